"""Sensors for processors, memory, disks and network, by psutil and the control groups of this process.

A sensor gives one reading a call. What is a rate needs an earlier reading, so the first one lacks it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from det_core._clock import monotonic
from det_core.core._profiler._cgroup import Cgroup, cpu_quota, cpu_seconds, free_memory
from det_core.core._profiler._mean import Reading

DISKS = ("/", "/determined_shared_fs")
"""File systems whose use is reported, where they exist."""


class Sensor(Protocol):
    """Reads one group of metrics."""

    group: str
    """The name of the metric group."""

    def read(self) -> Reading:
        """Read now. What cannot be known here is left out; what fails raises."""
        ...

    def close(self) -> None:
        """Let go of what the sensor holds."""
        ...


class Rates:
    """Turns counters into changes a second.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, dict[str, float]] | None = None

    def of(self, counters: dict[str, float] | None) -> dict[str, float]:
        """Return the rates since the last call; empty the first time, and for a counter that went
        backwards."""
        if counters is None:
            self._last = None
            return {}
        now, last = self._clock(), self._last
        self._last = (now, counters)
        if last is None or now <= last[0]:
            return {}
        changes = {name: value - last[1].get(name, value) for name, value in counters.items()}
        return {name: change / (now - last[0]) for name, change in changes.items() if change >= 0}


class Cpu:
    """Utilisation in percent of the processors that this process may use.

    Where a control group's quota is less than the processors it may run on, that is the group's own use of
    its quota; else it is the busy share of those processors, whoever uses them.
    """

    group = "cpu"

    def __init__(self, psutil: Any, root: Path = Path("/")) -> None:
        self._psutil = psutil
        self._group = Cgroup.find("cpu", root)
        self._accounts = self._group
        if self._group is not None and self._group.version == 1:
            self._accounts = Cgroup.find("cpuacct", root)
        self._rates = Rates()
        self._last: dict[int, tuple[float, float]] = {}

    def read(self) -> Reading:
        allowed = os.sched_getaffinity(0)
        quota = cpu_quota(self._group)
        if quota is None or self._accounts is None or quota[0] >= len(allowed):
            return self._busy(allowed)
        used = cpu_seconds(self._accounts, quota[1])
        rates = self._rates.of(None if used is None else {"used": used})
        return {"cpu_util_simple": 100 * rates["used"] / quota[0]} if rates else {}

    def _busy(self, allowed: set[int]) -> Reading:
        times = dict(enumerate(self._psutil.cpu_times(percpu=True)))
        now = {i: _busy_and_total(t) for i, t in times.items() if i in allowed or not allowed & times.keys()}
        last, self._last = self._last, now
        busy = sum(now[i][0] - last[i][0] for i in now.keys() & last.keys())
        total = sum(now[i][1] - last[i][1] for i in now.keys() & last.keys())
        return {"cpu_util_simple": 100 * min(1.0, max(0.0, busy / total))} if total > 0 else {}

    def close(self) -> None:
        self._last = {}


def _busy_and_total(times: Any) -> tuple[float, float]:
    """Seconds a processor was busy, and in all; the kernel counts a guest's time in user and nice already."""
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


class Memory:
    """Bytes that can still be used: the machine's, or what the control groups leave of them."""

    group = "memory"

    def __init__(self, psutil: Any, root: Path = Path("/")) -> None:
        self._psutil = psutil
        self._group = Cgroup.find("memory", root)

    def read(self) -> Reading:
        free = self._psutil.virtual_memory().available
        within = free_memory(self._group)
        return {"memory_free": free if within is None else min(free, within)}

    def close(self) -> None:
        pass


class Disk:
    """Operations and bytes a second of all disks, and how full the file systems are, in percent."""

    group = "disk"

    def __init__(self, psutil: Any, disks: tuple[str, ...] = DISKS) -> None:
        self._psutil = psutil
        self._disks = disks
        self._rates = Rates()

    def read(self) -> Reading:
        counters = self._psutil.disk_io_counters()
        reading: Reading = {}
        reading.update(
            self._rates.of(
                None
                if counters is None
                else {
                    "disk_iops": counters.read_count + counters.write_count,
                    "disk_throughput_read": counters.read_bytes,
                    "disk_throughput_write": counters.write_bytes,
                }
            )
        )
        for path in self._disks:
            if os.path.exists(path):
                reading[path] = {"disk_util": self._psutil.disk_usage(path).percent}
        return reading

    def close(self) -> None:
        pass


class Network:
    """Bytes a second over all interfaces, the loopback included."""

    group = "network"

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._rates = Rates()

    def read(self) -> Reading:
        counters = self._psutil.net_io_counters()
        if counters is None:
            return dict(self._rates.of(None))
        sent, received = counters.bytes_sent, counters.bytes_recv
        return dict(self._rates.of({"net_throughput_sent": sent, "net_throughput_recv": received}))

    def close(self) -> None:
        pass


def machine_sensors() -> list[Sensor]:
    """The sensors of this module and, where there is one, that of the GPUs.

    Raises:
        MissingExtra: psutil is not installed.
    """
    from det_core._env import Environment
    from det_core._optional import require
    from det_core.core._profiler._gpu import gpu_sensor

    psutil = require("psutil", extra="profiler", purpose="the profiler")
    sensors: list[Sensor] = [Cpu(psutil), Memory(psutil), Disk(psutil), Network(psutil)]
    gpu = gpu_sensor(Environment.read().cuda_visible_devices)
    return sensors if gpu is None else [*sensors, gpu]
