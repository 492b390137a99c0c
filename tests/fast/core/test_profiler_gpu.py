"""GPUs by a module that answers as nvidia-ml-py does: which are read, and what happens when one breaks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from det_core import core
from support.processes import until

pytest.importorskip("psutil")
UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")
FULL = {"gpu_util": 40, "gpu_free_memory": 1 << 30, "gpu_power": 250.5, "gpu_temperature": 61}


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

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.lost: set[str] = set()
        self.lacking: set[str] = set()
        self.open = 0
        self.uuids_are_bytes = False
        self.refuses: type[Exception] | None = None

    def nvmlInit(self) -> None:
        if self.refuses:
            raise self.refuses("no NVML")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return UUIDS[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:
        return handle.encode() if self.uuids_are_bytes else handle

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self._answer(handle, "util", 40))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(free=self._answer(handle, "memory", 1 << 30))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> float:
        return self._answer(handle, "power", 250_500)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> float:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer(handle, "temperature", 61)

    def _answer(self, handle: str, what: str, value: float) -> float:
        if handle in self.lost:
            raise self.NVMLError("GPU is lost")
        if what in self.lacking:
            raise self.NVMLError_NotSupported("Not Supported")
        return value


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def sampled() -> dict[str, Any]:
    """Return the GPUs in the first report of a profiler."""
    rows: list[tuple[str, Any, Any]] = []
    ranks: Any = SimpleNamespace(local_rank=0)
    profiler = core.ProfilerContext(ranks, lambda *row: rows.append(row), "agent")
    profiler.on(0.1, 1)
    until(lambda: any(group == "network" for group, _, _ in rows))  # from the second sample on; it is read before gpu
    profiler.off()
    found: list[dict[str, Any]] = [metrics["agent"] for group, _, metrics in rows if group == "gpu"]
    return found[0] if found else {}


def test_gpu_metrics_have_their_units(nvml: Nvml) -> None:
    assert sampled() == {uuid: FULL for uuid in UUIDS}
    assert nvml.open == 0, "the library is shut down as often as it was begun"


def test_gpu_uuid_of_bytes_is_decoded(nvml: Nvml) -> None:
    nvml.uuids_are_bytes = True
    assert set(sampled()) == set(UUIDS)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
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
        ("0,MIG-1234", [0]),
    ],
)
def test_cuda_visible_devices_follows_cudas_rules(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(sampled()) == [UUIDS[i] for i in indices]


def test_unsupported_gpu_values_are_omitted(nvml: Nvml) -> None:
    nvml.lacking = {"power", "temperature"}
    assert sampled()[UUIDS[0]] == {"gpu_util": 40, "gpu_free_memory": 1 << 30}


def test_lost_gpu_is_named_and_others_remain(nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.lost = {UUIDS[1]}
    assert set(sampled()) == {UUIDS[0], UUIDS[2]}
    assert caplog.text.count("omitting GPU-aabb-2, which fails: NVMLError: GPU is lost") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Nvml.NVMLError_LibraryNotFound, False),
        (Nvml.NVMLError_DriverNotLoaded, False),
        (Nvml.NVMLError, True),
    ],
)
def test_nvml_failure_leaves_other_sensors(
    nvml: Nvml, caplog: pytest.LogCaptureFixture, error: type[Exception], told: bool
) -> None:
    nvml.refuses = error
    assert sampled() == {}
    assert ("GPUs are not profiled: no NVML" in caplog.text) == told


def test_without_pynvml_the_other_sensors_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sampled() == {}


def test_names_used_exist_in_real_pynvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in vars(Nvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name), name
    sampled()
