"""torch writes into checkpoints and reads from them: shards of FSDP, on real ranks, and whole files in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import support
from support.checkpoints import STEPS, Recorder, alone, listed, nothing_is_left_over
from support.ranks import Ranks, running

torch = pytest.importorskip("torch")

TESTS = str(support.TESTS)
SCRIPT = "from support.sharding import main; import sys; main(*sys.argv[1:])"
ENV = {"PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"}


def lines(ranks: Ranks, word: str) -> list[list[list[str]]]:
    """By rank: the words after ``word`` in each line that begins with it."""
    return [
        [line.split()[1:] for line in ranks.output(rank).splitlines() if line.startswith(word + " ")]
        for rank in range(len(ranks.processes))
    ]


def run(folder: Path, size: int, what: str, storage: Any, *more: str) -> Ranks:
    args = (what, json.dumps(storage), str(folder), *more)
    with running(SCRIPT, size, folder, env=ENV, args=args) as ranks:
        assert ranks.wait() == [0] * size, "\n".join(ranks.output(rank)[-3000:] for rank in range(size))
    return ranks


def test_shards_come_back_bit_by_bit(tmp_path: Path) -> None:
    """Restore on more ranks than saved, from a directory and as from a bucket; a failed writer raises on all ranks."""
    store = tmp_path / "store"
    ranks = run(tmp_path, 2, "save", str(store), "store_path", "fail")
    saved = lines(ranks, "saved")
    assert all(found == saved[0] for found in saved)
    ((storage_id, digest),) = saved[0]
    for (told,) in lines(ranks, "told"):
        assert "was aborted: CheckpointException" in " ".join(told)
    assert listed(store) == [storage_id]
    nothing_is_left_over(store)
    files = {path.name for path in (store / storage_id).iterdir() if path.is_file()}
    assert files == {".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"}
    ranks = run(tmp_path, 3, "restore", str(store), storage_id)
    assert lines(ranks, "restored") == [[[digest], [digest]]] * 3
    size = sum((store / storage_id / name).stat().st_size for name in files)
    assert sum(int(found[0][0]) for found in lines(ranks, "fetched")) == size


def test_torch_save_in_place(tmp_path: Path) -> None:
    """Saved values are those of the call, although the training continues."""
    weights = torch.arange(100_000.0)
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store")
        with context.store_path(STEPS, blocking=False) as (path, storage_id):
            torch.save({"weights": weights}, path / "model.pt")
        weights.mul_(2)
        with context.store_path(STEPS, blocking=False) as (path, newer):
            torch.save({"weights": weights}, path / "model.pt")
        context.close()
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store")
        for name, factor in ((storage_id, 1.0), (newer, 2.0)):
            with context.restore_path(name) as path:
                found = torch.load(path / "model.pt", weights_only=True)["weights"]
            assert torch.equal(found, torch.arange(100_000.0) * factor)
    assert sorted(listed(tmp_path / "store")) == sorted([storage_id, newer])
