"""The thread that samples."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from det_core._clock import monotonic
from det_core.core._profiler._gpu import PartialReading
from det_core.core._profiler._mean import Mean
from det_core.core._profiler._sensors import Sensor

logger = logging.getLogger("det_core.core")

STOP_TIMEOUT = 30.0
"""Seconds that ``stop`` waits for a sensor that is being read."""


class Sampler:
    """Reads all sensors every ``interval`` seconds, and reports the means of ``samples`` readings.

    Args:
        sensors: what to read; closed by :meth:`stop`. report: takes group, step (None) and metrics; called
            on the sampling thread, the last time by :meth:`stop`.
        agent_id: the key under which a group's means are reported.
        interval: seconds between the beginnings of two samples; a beat that is missed is left out.
        samples: readings in a report.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor],
        report: Callable[[str, int | None, Mapping[str, Any]], None],
        agent_id: str,
        interval: float,
        samples: int,
    ) -> None:
        self._sensors = sensors
        self._report = report
        self._agent_id = agent_id
        self._interval = interval
        self._samples = samples
        self._means = {sensor.group: Mean() for sensor in sensors}
        self._failures: dict[str, tuple[int, Exception]] = {}
        self._failures_lock = threading.Lock()
        self._reading = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="det_core-profiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, report the samples since the last report, and close the sensors."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            self._failed(self._reading, TimeoutError(f"no answer for {STOP_TIMEOUT:.0f} s"))
            return
        self._send()
        for sensor in self._sensors:
            try:
                sensor.close()
            except Exception as e:
                self._failed(sensor.group, e)

    def take_failures(self) -> list[str]:
        """What failed since the last call, a sentence for each sensor."""
        with self._failures_lock:
            failures, self._failures = self._failures, {}
        return [f"{what} ({n} times): {type(e).__name__}: {e}" for what, (n, e) in failures.items()]

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as e:
            self._failed("the sampling thread, which has ended", e)

    def _sample_until_stopped(self) -> None:
        taken, beat = 0, monotonic()
        while True:
            self._sample()
            taken += 1
            if taken % self._samples == 0 and not self._stop.is_set():
                self._send()
            beat += self._interval
            late = monotonic() - beat
            if late > 0:
                beat += self._interval * (late // self._interval)
            if self._stop.wait(max(0.0, beat - monotonic())):
                return

    def _sample(self) -> None:
        for sensor in self._sensors:
            self._reading = sensor.group
            try:
                self._means[sensor.group].add(sensor.read())
            except PartialReading as e:
                self._means[sensor.group].add(e.reading)
                self._failed(sensor.group, e)
            except Exception as e:
                self._failed(sensor.group, e)
            if self._stop.is_set():
                return

    def _send(self) -> None:
        for group, mean in self._means.items():
            values = mean.take()
            if not values:
                continue
            try:
                self._report(group, None, {self._agent_id: values})
            except Exception as e:
                self._failed(f"reporting {group}", e)

    def _failed(self, what: str, error: Exception) -> None:
        with self._failures_lock:
            count, first = self._failures.get(what, (0, error))
            self._failures[what] = (count + 1, first)
        if not count:
            logger.warning("profiler: %s: %s: %s", what, type(error).__name__, error)
