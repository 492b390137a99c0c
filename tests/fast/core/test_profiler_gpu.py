"""The GPU sensor against a module that answers as nvidia-ml-py does; which GPUs it reads, and what breaks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from det_core.core._profiler._gpu import Gpu, PartialReading, gpu_sensor

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")
MIG = "MIG-1234"


class Nvml(ModuleType):
    """Answers from a table; ``lost`` GPUs raise, ``lacking`` values are not supported."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    def __init__(self, *, bytes_uuids: bool = False, init_error: type[NVMLError] | None = None) -> None:
        super().__init__("pynvml")
        self.lost: set[str] = set()
        self.lacking: set[str] = set()
        self.open = 0
        self._bytes = bytes_uuids
        self._init_error = init_error

    def nvmlInit(self) -> None:
        if self._init_error:
            raise self._init_error("no NVML")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return UUIDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != MIG:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:
        return handle.encode() if self._bytes else handle

    def _answer(self, handle: str, what: str, value: float) -> float:
        if handle in self.lost:
            raise self.NVMLError("GPU is lost")
        if what in self.lacking or (handle == MIG and what == "util"):
            raise self.NVMLError_NotSupported("Not Supported")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        nvml = self

        class Rates:
            gpu = nvml._answer(handle, "util", 40)

        return Rates()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        nvml = self

        class Info:
            free = nvml._answer(handle, "memory", 1 << 30)

        return Info()

    def nvmlDeviceGetPowerUsage(self, handle: str) -> float:
        return self._answer(handle, "power", 250_500)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> float:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer(handle, "temperature", 61)


FULL = {"gpu_util": 40, "gpu_free_memory": 1 << 30, "gpu_power": 250.5, "gpu_temperature": 61}


def test_a_gpu_is_read_with_the_units_of_the_metrics() -> None:
    sensor = Gpu(Nvml(), None)
    assert sensor.read() == {uuid: FULL for uuid in UUIDS}


def test_uuids_may_be_bytes() -> None:
    assert set(Gpu(Nvml(bytes_uuids=True), "GPU-cc").read()) == {"GPU-cccc-3"}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 0 , 2 ", [0, 2]),
        ("0,7,1", [0]),
        ("1,-1,0", [1]),
        ("GPU-cccc-3,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),
        ("GPU-zz,0", []),
    ],
)
def test_cuda_visible_devices_is_read_by_cudas_rules(visible: str | None, indices: list[int]) -> None:
    assert list(Gpu(Nvml(), visible).read()) == [UUIDS[i] for i in indices]


def test_a_mig_instance_has_the_values_it_offers() -> None:
    sensor = Gpu(Nvml(), f"{MIG},MIG-gone,0")
    assert sensor.read() == {MIG: {k: v for k, v in FULL.items() if k != "gpu_util"}}


def test_values_that_a_gpu_does_not_offer_are_left_out() -> None:
    nvml = Nvml()
    nvml.lacking = {"power", "temperature"}
    assert Gpu(nvml, "0").read() == {UUIDS[0]: {"gpu_util": 40, "gpu_free_memory": 1 << 30}}


def test_a_lost_gpu_is_named_and_hides_no_other() -> None:
    nvml = Nvml()
    sensor = Gpu(nvml, None)
    nvml.lost = {UUIDS[1]}
    with pytest.raises(PartialReading, match="GPU-aabb-2: GPU is lost") as failed:
        sensor.read()
    assert set(failed.value.reading) == {UUIDS[0], UUIDS[2]}


def test_the_library_is_shut_down_as_often_as_it_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sensor = gpu_sensor("0")
    assert sensor is not None and nvml.open == 1
    sensor.close()
    assert nvml.open == 0
    assert gpu_sensor("") is None
    assert nvml.open == 0


@pytest.mark.parametrize("error", [Nvml.NVMLError_LibraryNotFound, Nvml.NVMLError_DriverNotLoaded])
def test_a_machine_without_gpus_has_no_sensor(monkeypatch: pytest.MonkeyPatch, error: type[Nvml.NVMLError]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(init_error=error))
    assert gpu_sensor(None) is None


def test_a_driver_that_fails_otherwise_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(init_error=Nvml.NVMLError))
    with pytest.raises(Nvml.NVMLError):
        gpu_sensor(None)


def test_the_real_module_is_asked_with_names_that_it_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in vars(Nvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name
    gpu_sensor("")
