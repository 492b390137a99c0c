"""``ctx.profiler``: switches the sampling on and off, and says what went wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.errors import ContextClosed, ProfilerError

if TYPE_CHECKING:
    from det_core.core._distributed import DistributedContext
    from det_core.core._profiler._sampler import Sampler
    from det_core.core._profiler._sensors import Sensor

MIN_INTERVAL = 0.1
"""Seconds; sampling more often would measure itself."""


class ProfilerContext:
    """Samples processors, memory, disks, network and GPUs, and reports their means as metric groups.

    The groups are ``cpu``, ``memory``, ``disk``, ``network`` and ``gpu``, each a dictionary by
    ``agent_id``; their rows have no step. One process samples for its machine: the one of local rank 0. On
    the others, ``on()`` and ``off()`` check their arguments and do nothing else.

    A sensor that fails is logged once and does not stop the others; the failure is raised by the next
    ``on()``, ``off()`` or ``close()``, which has done its work by then.

    Args:
        distributed: tells which rank samples.
        report: takes group, step (None) and metrics.
        agent_id: names the machine in the metrics.
        sensors: makes the sensors; left out, all that this machine has.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        report: Callable[[str, int | None, Mapping[str, Any]], None],
        agent_id: str,
        *,
        sensors: Callable[[], Sequence[Sensor]] | None = None,
    ) -> None:
        self._samples_here = distributed.local_rank == 0
        self._report = report
        self._agent_id = agent_id
        self._sensors = sensors
        self._sampler: Sampler | None = None
        self._closed = False

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Begin to sample; nothing happens if that has begun already.

        Args:
            sampling_interval: seconds between samples, from 0.1 on.
            samples_per_report: samples whose mean makes one report, from 1 on.

        Raises:
            TypeError, ValueError: an argument is no such number.
            MissingExtra: psutil is not installed; the message is the command to install it.
            ProfilerError: sensors failed since the last call.
        """
        _check(sampling_interval, samples_per_report)
        if self._closed:
            raise ContextClosed("profiler.on() was called on a context that is closed")
        if not self._samples_here:
            return
        if self._sampler is not None:
            _raise_failures(self._sampler)
            return
        from det_core.core._profiler._sampler import Sampler
        from det_core.core._profiler._sensors import machine_sensors

        sensors = (self._sensors or machine_sensors)()
        self._sampler = Sampler(sensors, self._report, self._agent_id, sampling_interval, samples_per_report)

    def off(self) -> None:
        """End the sampling: the thread has ended and the last samples are reported when this returns.

        Raises:
            ProfilerError: sensors failed since the last call.
        """
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
            _raise_failures(sampler)

    def close(self) -> None:
        """As :meth:`off`, for good."""
        self._closed = True
        self.off()


def _raise_failures(sampler: Sampler) -> None:
    if failures := sampler.take_failures():
        raise ProfilerError("the profiler lacks samples: " + "; ".join(failures))


def _check(sampling_interval: Any, samples_per_report: Any) -> None:
    if isinstance(sampling_interval, bool) or not isinstance(sampling_interval, (int, float)):
        raise TypeError(f"sampling_interval must be a number of seconds, not {sampling_interval!r}")
    if not MIN_INTERVAL <= sampling_interval < float("inf"):
        raise ValueError(f"sampling_interval is {sampling_interval}: expected {MIN_INTERVAL} seconds or more")
    if isinstance(samples_per_report, bool) or not isinstance(samples_per_report, int):
        raise TypeError(f"samples_per_report must be an integer, not {samples_per_report!r}")
    if samples_per_report < 1:
        raise ValueError(f"samples_per_report is {samples_per_report}: expected 1 or more")
