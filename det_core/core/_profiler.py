"""``ctx.profiler``: samples of the machine, reported as metric groups.

One thread reads psutil and, where there are GPUs, nvidia-ml-py. What it reports is an extra beside the script's own
metrics, so nothing that goes wrong in it ends a training: a sensor that fails is logged once, its values are left out
until it can be read again, and the others go on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from det_core._clock import monotonic
from det_core._optional import install_command, require
from det_core.errors import ContextClosed

if TYPE_CHECKING:
    from det_core.core._distributed import DistributedContext

logger = logging.getLogger("det_core.core")

MIN_INTERVAL = 0.1
"""Seconds; sampling more often would measure itself."""
STOP_TIMEOUT = 5.0
"""Seconds that ``off()`` waits for a sensor that is being read: a driver may hang."""
DISKS = ("/", "/determined_shared_fs")
"""File systems whose use is reported, where they exist."""
CGROUP = Path("/sys/fs/cgroup")
"""The control group of this process, in a container with a namespace of its own (version 2)."""
NVIDIA_DRIVER = "/dev/nvidiactl"
"""The device file that a loaded NVIDIA driver makes."""

Report = Callable[[str, "int | None", Mapping[str, Any]], None]
"""Takes group, step (None here) and metrics."""
Reading = dict[tuple[str, ...], float]
"""Numbers by the keys that lead to them in the report: ``("/", "disk_util")``."""


class ProfilerContext:
    """Samples processors, memory, disks, network and GPUs, and reports their means as metric groups.

    The groups are ``cpu``, ``memory``, ``disk``, ``network`` and ``gpu``, each a dictionary by ``agent_id``; their
    rows have no step. One process samples for its machine: the one of local rank 0. On the others, ``on()`` and
    ``off()`` check their arguments and do nothing else.

    A sensor that fails is logged once and left out until it can be read again; that never ends a training.

    Args:
        distributed: tells which rank samples.
        report: takes group, step (None) and metrics.
        agent_id: names the machine in the metrics.
    """

    def __init__(self, distributed: DistributedContext, report: Report, agent_id: str) -> None:
        self._samples_here = distributed.local_rank == 0
        self._report = report
        self._agent_id = agent_id
        self._sampler: _Sampler | None = None
        self._closed = False

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Begin to sample; nothing happens if that has begun already.

        Args:
            sampling_interval: seconds between samples, from 0.1 on.
            samples_per_report: samples whose mean makes one report, from 1 on.

        Raises:
            TypeError, ValueError: an argument is no such number.
            MissingExtra: psutil is not installed; the message is the command to install it.
        """
        _check(sampling_interval, samples_per_report)
        if self._closed:
            raise ContextClosed("profiler.on() was called on a context that is closed")
        if self._samples_here and self._sampler is None:
            psutil = require("psutil", extra="profiler", purpose="the profiler")
            self._sampler = _Sampler(psutil, self._report, self._agent_id, sampling_interval, samples_per_report)

    def off(self) -> None:
        """End the sampling: the thread has ended and the last samples are reported when this returns.

        A sensor that does not answer for 5 seconds is left behind, with a warning.
        """
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()

    def close(self) -> None:
        """As :meth:`off`, for good."""
        self._closed = True
        self.off()


def _check(sampling_interval: Any, samples_per_report: Any) -> None:
    if isinstance(sampling_interval, bool) or not isinstance(sampling_interval, (int, float)):
        raise TypeError(f"sampling_interval must be a number of seconds, not {sampling_interval!r}")
    if not MIN_INTERVAL <= sampling_interval < float("inf"):
        raise ValueError(f"sampling_interval is {sampling_interval}: expected {MIN_INTERVAL} seconds or more")
    if isinstance(samples_per_report, bool) or not isinstance(samples_per_report, int):
        raise TypeError(f"samples_per_report must be an integer, not {samples_per_report!r}")
    if samples_per_report < 1:
        raise ValueError(f"samples_per_report is {samples_per_report}: expected 1 or more")


class _Sensor(NamedTuple):
    """What is read together, and fails alone.

    Attributes:
        name: as warnings say it.
        group: the metric group it belongs to.
        read: gives the values of now. What cannot be known here is left out; what fails raises.
    """

    name: str
    group: str
    read: Callable[[], Reading]


class _Sampler:
    """The thread: reads all sensors every ``interval`` seconds, and reports the means of ``count`` readings."""

    def __init__(self, psutil: Any, report: Report, agent_id: str, interval: float, count: int) -> None:
        self._nvml = _nvml()
        self._sensors = [
            _Sensor("cpu", "cpu", _cpu(psutil)),
            _Sensor("memory", "memory", lambda: _memory(psutil)),
            _Sensor("disk", "disk", _disk(psutil)),
            _Sensor("network", "network", _network(psutil)),
            *([] if self._nvml is None else _gpus(self._nvml)),
        ]
        self._report = report
        self._agent_id = agent_id
        self._interval, self._count = interval, count
        self._samples: dict[str, list[Reading]] = {}
        self._failing: set[str] = set()
        self._reading = ""
        self._left_behind = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="det_core-profiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which reports the samples since the last report."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            self._left_behind = True
            logger.warning("profiler: %s does not answer for %.0f s and is left behind", self._reading, STOP_TIMEOUT)

    def _run(self) -> None:
        taken, due = 0, monotonic()
        while not self._stop.is_set():
            self._sample()
            taken += 1
            if taken % self._count == 0 and not self._stop.is_set():
                self._send()
            due = max(due + self._interval, monotonic())  # a sample that is late is not made up for
            self._stop.wait(due - monotonic())
        self._send()
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _sample(self) -> None:
        for sensor in self._sensors:
            self._reading = sensor.name
            try:
                reading = sensor.read()
            except Exception as e:
                self._warn(sensor.name, e)
            else:
                self._failing.discard(sensor.name)
                self._samples.setdefault(sensor.group, []).append(reading)

    def _send(self) -> None:
        samples, self._samples = self._samples, {}
        for group, readings in samples.items():
            if (values := _means(readings)) and not self._left_behind:
                try:
                    self._report(group, None, {self._agent_id: values})
                except Exception as e:
                    self._warn(f"the report of {group}", e)

    def _warn(self, what: str, error: Exception) -> None:
        """Once for each trouble: a sensor that fails again and again fills no log."""
        if what not in self._failing:
            self._failing.add(what)
            logger.warning("profiler: %s fails and is left out: %s: %s", what, type(error).__name__, error)


def _means(readings: list[Reading]) -> dict[str, Any]:
    """The mean of each number over the readings that have it, nested by its keys."""
    means: dict[str, Any] = {}
    for keys in dict.fromkeys(keys for reading in readings for keys in reading):
        values = [reading[keys] for reading in readings if keys in reading]
        level = means
        for key in keys[:-1]:
            level = level.setdefault(key, {})
        level[keys[-1]] = sum(values) / len(values)
    return means


def _cpu(psutil: Any) -> Callable[[], Reading]:
    """The busy share, in percent, of the processors that this process may run on, whoever uses them."""
    read_before = False

    def read() -> Reading:
        nonlocal read_before
        each = psutil.cpu_percent(percpu=True)  # since the call before; what the first one gives means nothing
        if not read_before:
            read_before = True
            return {}
        allowed = [each[i] for i in os.sched_getaffinity(0) if i < len(each)] or each
        return {("cpu_util_simple",): sum(allowed) / len(allowed)}

    return read


def _memory(psutil: Any) -> Reading:
    """Bytes that can still be used: the machine's, or what the control group leaves of them."""
    free, within = psutil.virtual_memory().available, _left_by_the_cgroup()
    return {("memory_free",): free if within is None else min(free, within)}


def _left_by_the_cgroup() -> int | None:
    """Bytes below the group's limit; None without one. File cache that the kernel drops first counts as free.

    Format: the kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        details = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - max(0, used - int(details["inactive_file"])))


def _disk(psutil: Any) -> Callable[[], Reading]:
    """Operations and bytes a second of all disks, and how full the file systems are, in percent."""
    rates = _Rates()

    def read() -> Reading:
        reading: Reading = {}
        if (counters := psutil.disk_io_counters()) is not None:
            reading |= rates.of(
                disk_iops=counters.read_count + counters.write_count,
                disk_throughput_read=counters.read_bytes,
                disk_throughput_write=counters.write_bytes,
            )
        for path in filter(os.path.exists, DISKS):
            reading[path, "disk_util"] = psutil.disk_usage(path).percent
        return reading

    return read


def _network(psutil: Any) -> Callable[[], Reading]:
    """Bytes a second over all interfaces, the loopback included."""
    rates = _Rates()

    def read() -> Reading:
        counters = psutil.net_io_counters()
        if counters is None:
            return {}
        return rates.of(net_throughput_sent=counters.bytes_sent, net_throughput_recv=counters.bytes_recv)

    return read


class _Rates:
    """Turns counters into changes a second."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, float]] | None = None

    def of(self, **counters: float) -> Reading:
        """The rates since the last call; empty the first time, and without a counter that went backwards."""
        now, before = monotonic(), self._before
        self._before = (now, counters)
        if before is None or now <= before[0]:
            return {}
        changes = {name: value - before[1][name] for name, value in counters.items()}
        return {(name,): change / (now - before[0]) for name, change in changes.items() if change >= 0}


def _nvml() -> Any | None:
    """The module of nvidia-ml-py, initialised; None on a machine without NVIDIA GPUs that can be asked."""
    try:
        import pynvml
    except ImportError as e:
        if os.path.exists(NVIDIA_DRIVER):
            logger.warning("GPUs are not profiled: %s (%s)", install_command("profiler"), e)
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission):
        return None
    except pynvml.NVMLError as e:
        logger.warning("GPUs are not profiled: %s", e)
        return None
    return pynvml


def _gpus(nvml: Any) -> list[_Sensor]:
    """A sensor for each GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible, so that one that is lost hides no other."""
    from det_core._env import Environment

    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        all_gpus = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except nvml.NVMLError as e:
        logger.warning("GPUs are not profiled: %s", e)
        return []
    visible = _visible(list(all_gpus), Environment.read().cuda_visible_devices)
    return [_Sensor(uuid, "gpu", _gpu(nvml, uuid, all_gpus[uuid])) for uuid in visible]


def _gpu(nvml: Any, uuid: str, handle: Any) -> Callable[[], Reading]:
    """Utilisation (%), free memory (bytes), power (W) and temperature (°C) of one GPU, as far as it offers them."""
    values: dict[str, Callable[[], float]] = {
        "gpu_util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu_free_memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free,
        "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }

    def read() -> Reading:
        reading: Reading = {}
        for name, value in values.items():
            try:
                reading[uuid, name] = value()
            except nvml.NVMLError_NotSupported:
                continue
        return reading

    return read


def _visible(uuids: list[str], setting: str | None) -> list[str]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, by CUDA's rules: the first entry that names none ends the list.

    Indices are NVML's, in the order of the PCI bus, which CUDA follows with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or where
    all GPUs are alike. An entry that begins with ``GPU-`` is the beginning of one UUID; MIG instances are none of
    NVML's GPUs.

    Args:
        uuids: of all GPUs, by index.
        setting: the variable's value; None: not set.
    """
    if setting is None:
        return uuids
    found: list[str] = []
    for entry in map(str.strip, setting.split(",")):
        if entry.isdigit():
            named = uuids[int(entry) : int(entry) + 1]
        else:
            named = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(named) != 1:
            break
        found += named
    return found


def _text(value: str | bytes) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
