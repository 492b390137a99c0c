"""GPUs are found, and each slot sees its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from det_core.master.engines import Slots


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi in place that answers as one with two GPUs does."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nassert '--query-gpu=uuid' in sys.argv\nprint('GPU-a\\nGPU-b')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Slots.find() == Slots(1)
    assert Slots.find(3).variables([2]) == {}
    assert Slots.find(0).count == 0
    with pytest.raises(ValueError, match="slots=-1: expected 0 or more"):
        Slots.find(-1)


def test_each_slot_is_a_gpu(two_gpus: None) -> None:
    slots = Slots.find()
    assert slots.count == 2
    assert slots.variables([1]) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert slots.variables([0, 1])["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert slots.variables([])["CUDA_VISIBLE_DEVICES"] == ""
    assert slots.gpu_uuids([1]) == ["GPU-b"]


def test_slots_share_gpus_when_there_are_more(two_gpus: None) -> None:
    slots = Slots.find(5)
    assert slots.count == 5
    assert [slots.variables([i])["CUDA_VISIBLE_DEVICES"] for i in range(5)] == ["0", "1", "0", "1", "0"]
    assert slots.variables([0, 2])["CUDA_VISIBLE_DEVICES"] == "0"


def test_only_the_gpus_that_the_master_may_see_count(two_gpus: None) -> None:
    assert Slots.find(visible="1") == Slots(1, ("1",), ("GPU-b",))
    assert Slots.find(visible="GPU-b,GPU-a").gpu_uuids([0]) == ["GPU-b"]
    assert Slots.find(visible="") == Slots.find(visible="-1") == Slots(1)


def test_list_of_visible_gpus_ends_at_a_name_that_no_gpu_has(two_gpus: None) -> None:
    assert Slots.find(visible="0,5") == Slots(1, ("0",), ("GPU-a",))
    assert Slots.find(visible="5,0") == Slots.find(visible="GPU-c") == Slots(1)
    assert Slots.find(visible="1,MIG-x").variables([1])["CUDA_VISIBLE_DEVICES"] == "MIG-x"
