"""The sensor for NVIDIA GPUs, by nvidia-ml-py, of those that ``CUDA_VISIBLE_DEVICES`` leaves visible."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from det_core._optional import install_command
from det_core.core._profiler._mean import Reading

logger = logging.getLogger("det_core.core")

_DRIVER = "/dev/nvidiactl"
"""The device file that a loaded NVIDIA driver makes."""


class Gpu:
    """Utilisation, free memory, power and temperature of each visible GPU, by its UUID.

    A value that a GPU does not offer (a MIG instance has no utilisation of its own) is left out. A GPU
    that fails does not hide the others: they are read first, then the failure is raised with them
    attached.

    Args:
        pynvml: the module of nvidia-ml-py.
        visible: the value of ``CUDA_VISIBLE_DEVICES``; None: not set.
    """

    group = "gpu"

    def __init__(self, pynvml: Any, visible: str | None) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        try:
            self._handles = {_text(pynvml.nvmlDeviceGetUUID(h)): h for h in _visible_handles(pynvml, visible)}
        except BaseException:
            pynvml.nvmlShutdown()
            raise

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> Reading:
        reading: Reading = {}
        failed: dict[str, Exception] = {}
        for uuid, handle in self._handles.items():
            try:
                reading[uuid] = self._read(handle)
            except self._nvml.NVMLError as e:
                failed[uuid] = e
        if failed:
            raise PartialReading("; ".join(f"{uuid}: {e}" for uuid, e in failed.items()), reading)
        return reading

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml
        values: dict[str, Callable[[], float]] = {
            "gpu_util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_free_memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free,
            "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        reading: Reading = {}
        for name, value in values.items():
            try:
                reading[name] = value()
            except nvml.NVMLError_NotSupported:
                continue
        return reading

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class PartialReading(Exception):
    """Some of a sensor's devices failed; ``reading`` is what the others gave."""

    def __init__(self, message: str, reading: Reading) -> None:
        super().__init__(message)
        self.reading = reading


def gpu_sensor(visible: str | None) -> Gpu | None:
    """The sensor of this machine's GPUs; None where there is no driver or no visible GPU."""
    try:
        import pynvml
    except ImportError as e:
        if os.path.exists(_DRIVER):
            logger.warning("GPUs are not profiled: %s (%s)", install_command("profiler"), e)
        return None
    try:
        sensor = Gpu(pynvml, visible)
    except (
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_NoPermission,
    ):
        return None
    if not len(sensor):
        sensor.close()
        return None
    return sensor


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """The handles that ``CUDA_VISIBLE_DEVICES`` names, by CUDA's rules: the first wrong entry ends the list.

    Indices are NVML's, in the order of the PCI bus, which CUDA follows with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or where all GPUs are alike.
    """
    every = range(nvml.nvmlDeviceGetCount())
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in every]
    uuids: dict[str, int] | None = None
    handles = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) in every:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith("GPU-"):
            if uuids is None:
                uuids = {_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i))): i for i in every}
            matches = [index for uuid, index in uuids.items() if uuid.startswith(entry)]
            if len(matches) != 1:
                break
            handles.append(nvml.nvmlDeviceGetHandleByIndex(matches[0]))
        elif entry.startswith("MIG-"):
            try:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
            except nvml.NVMLError:
                break
        else:
            break
    return handles


def _text(value: str | bytes) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
