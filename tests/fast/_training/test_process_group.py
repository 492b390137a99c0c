"""The device of each rank of a machine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from det_core._training.process_group import local_device  # noqa: E402


def test_a_rank_without_a_gpu_of_its_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"local rank 2 has no GPU: 2 visible, .*--nproc-per-node 2"):
        local_device(2)
