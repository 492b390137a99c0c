"""``ctx.profiler``: samples of the machine, reported as metric groups.

One thread reads psutil and, where there are GPUs, nvidia-ml-py. Its reports are an extra to the script's own metrics,
so no error in it ends a training: a sensor that fails is logged once, and its values are omitted until it can be read
again.
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
"""Minimum sampling interval in seconds; sampling more often would measure itself."""
STOP_TIMEOUT = 5.0
"""Maximum wait of ``off()`` for a sensor that is being read, in seconds: a driver may hang."""
DISKS = ("/", "/determined_shared_fs")
"""File systems whose usage is reported, if they exist."""
CGROUP = Path("/sys/fs/cgroup")
"""Control group of this process, in a container with its own namespace (version 2)."""
NVIDIA_DRIVER = "/dev/nvidiactl"
"""Device file that a loaded NVIDIA driver creates."""

Report = Callable[[str, "int | None", Mapping[str, Any]], None]
"""Function that reports metrics: group, step (None here), metrics."""
Reading = dict[tuple[str, ...], float]
"""Numbers by the keys that lead to them in the report: ``("/", "disk_util")``."""


class ProfilerContext:
    """Sampler of processors, memory, disks, network and GPUs, which reports means as metric groups.

    The groups are ``cpu``, ``memory``, ``disk``, ``network`` and ``gpu``, each a dictionary by ``agent_id``; their
    rows have no step. Local rank 0 samples for its node. On other ranks, ``on()`` and ``off()`` only check their
    arguments.

    A sensor that fails is logged once and omitted until it can be read again; that never ends a training.

    Args:
        distributed: ranks of the job.
        report: called with group, step (None) and metrics.
        agent_id: name of the node in the metrics.
    """

    def __init__(self, distributed: DistributedContext, report: Report, agent_id: str) -> None:
        self._samples_here = distributed.local_rank == 0
        self._report = report
        self._agent_id = agent_id
        self._sampler: _Sampler | None = None
        self._closed = False

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Start sampling; does nothing if it has started.

        Args:
            sampling_interval: time between samples in seconds, at least 0.1.
            samples_per_report: number of samples whose mean is one report, at least 1.

        Raises:
            TypeError, ValueError: If an argument is not such a number.
            MissingExtra: If psutil is not installed; the message is the command to install it.
        """
        _check(sampling_interval, samples_per_report)
        if self._closed:
            raise ContextClosed("profiler.on() was called on a context that is closed")
        if self._samples_here and self._sampler is None:
            psutil = require("psutil", extra="profiler", purpose="the profiler")
            self._sampler = _Sampler(psutil, self._report, self._agent_id, sampling_interval, samples_per_report)

    def off(self) -> None:
        """Stop sampling, and return once the thread has ended and the last samples are reported.

        A sensor that does not answer for 5 seconds is abandoned, with a warning.
        """
        sampler = self._sampler
        self._sampler = None
        if sampler is not None:
            sampler.stop()

    def close(self) -> None:
        """Stop sampling for good; :meth:`on` raises afterwards."""
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
    """Values that are read together, and fail apart from other sensors.

    Attributes:
        name: name in warnings.
        group: metric group.
        read: returns the current values, without those that are unknown on this machine. Raises if it fails.
    """

    name: str
    group: str
    read: Callable[[], Reading]


class _Sampler:
    """Thread that reads all sensors every ``interval`` seconds, and reports the means of ``count`` readings."""

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
        self._interval = interval
        self._count = count
        self._samples: dict[str, list[Reading]] = {}
        self._failing: set[str] = set()
        self._reading = ""
        self._abandoned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="det_core-profiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which first reports the samples since the last report."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            self._abandoned = True
            logger.warning("profiler: abandoning %s: no answer for %.0f s", self._reading, STOP_TIMEOUT)

    def _run(self) -> None:
        taken = 0
        due = monotonic()
        while not self._stop.is_set():
            self._sample()
            taken += 1
            if taken % self._count == 0 and not self._stop.is_set():
                self._send()
            # A late sample moves the later ones: several in a row would measure the same moment.
            due = max(due + self._interval, monotonic())
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
        samples = self._samples
        self._samples = {}
        for group, readings in samples.items():
            if (values := _means(readings)) and not self._abandoned:
                try:
                    self._report(group, None, {self._agent_id: values})
                except Exception as e:
                    self._warn(f"the report of {group}", e)

    def _warn(self, source: str, error: Exception) -> None:
        """Warn once until the source can be read again."""
        if source not in self._failing:
            self._failing.add(source)
            logger.warning("profiler: omitting %s, which fails: %s: %s", source, type(error).__name__, error)


def _means(readings: list[Reading]) -> dict[str, Any]:
    """Return the mean of each number over the readings that have it, nested by its keys."""
    means: dict[str, Any] = {}
    for keys in dict.fromkeys(keys for reading in readings for keys in reading):
        values = [reading[keys] for reading in readings if keys in reading]
        level = means
        for key in keys[:-1]:
            level = level.setdefault(key, {})
        level[keys[-1]] = sum(values) / len(values)
    return means


def _cpu(psutil: Any) -> Callable[[], Reading]:
    """Return a reader of the busy share, in percent, of the processors that this process may run on."""
    read_before = False

    def read() -> Reading:
        nonlocal read_before
        percents = psutil.cpu_percent(percpu=True)
        if not read_before:  # the shares are since the last call; those of the first call mean nothing
            read_before = True
            return {}
        allowed = [percents[i] for i in os.sched_getaffinity(0) if i < len(percents)] or percents
        return {("cpu_util_simple",): sum(allowed) / len(allowed)}

    return read


def _memory(psutil: Any) -> Reading:
    """Return the bytes that can still be used: the machine's, or fewer by the limit of the control group."""
    free = psutil.virtual_memory().available
    below_limit = _free_in_cgroup()
    if below_limit is not None:
        free = min(free, below_limit)
    return {("memory_free",): free}


def _free_in_cgroup() -> int | None:
    """Return the bytes below the limit of the control group, None without a limit.

    Format: the kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        details = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    # The kernel drops inactive file cache first: it counts as free.
    return max(0, int(limit) - max(0, used - int(details["inactive_file"])))


def _disk(psutil: Any) -> Callable[[], Reading]:
    """Return a reader of operations and bytes a second of all disks, and of the usage of file systems in percent."""
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
    """Return a reader of bytes a second over all interfaces, the loopback included."""
    rates = _Rates()

    def read() -> Reading:
        counters = psutil.net_io_counters()
        if counters is None:
            return {}
        return rates.of(net_throughput_sent=counters.bytes_sent, net_throughput_recv=counters.bytes_recv)

    return read


class _Rates:
    """Counters as changes a second."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, float]] | None = None

    def of(self, **counters: float) -> Reading:
        """Return the rates since the last call, without counters that went backwards; empty the first time."""
        now = monotonic()
        before = self._before
        self._before = (now, counters)
        if before is None or now <= before[0]:
            return {}
        changes = {name: value - before[1][name] for name, value in counters.items()}
        return {(name,): change / (now - before[0]) for name, change in changes.items() if change >= 0}


def _nvml() -> Any | None:
    """Return the initialized module of nvidia-ml-py, or None on a machine without usable NVIDIA GPUs."""
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
    """Return a sensor for each GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible; a lost GPU hides no other."""
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
    """Return a reader of one GPU: utilization (%), free memory (bytes), power (W), temperature (°C), if supported."""
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
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, by CUDA's rules: the first invalid entry ends the list.

    Indices are NVML's, in the order of the PCI bus, which CUDA follows with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or where
    all GPUs are alike. An entry that begins with ``GPU-`` is the beginning of one UUID; MIG instances are not among
    NVML's GPUs.

    Args:
        uuids: UUIDs of all GPUs, by index.
        setting: value of the variable, None if unset.
    """
    if setting is None:
        return uuids
    visible: list[str] = []
    for entry in map(str.strip, setting.split(",")):
        if entry.isdigit():
            named = uuids[int(entry) : int(entry) + 1]
        else:
            named = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(named) != 1:
            break
        visible += named
    return visible


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):  # from older versions of nvidia-ml-py
        return value.decode()
    return value
