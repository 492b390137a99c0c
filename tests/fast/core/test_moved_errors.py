"""The exceptions that scripts for Determined catch: each usual failure of its Core API is one of that kind here, too.

What is raised there is in the wire contract; the table of docs/moving.md has a row for each row here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core, errors
from support import ROOT
from support.threads import as_ranks

Failure = Callable[[core.Context, Path], object]


def _complete_twice(ctx: core.Context) -> None:
    for op in ctx.searcher.operations():
        op.report_completed(1.0)
        op.report_completed(1.0)


def _progress_after_completion(ctx: core.Context) -> None:
    for op in ctx.searcher.operations():
        op.report_completed(1.0)
        op.report_progress(2)


def _restore(ctx: core.Context, storage_id: str) -> None:
    with ctx.checkpoint.restore_path(storage_id):
        raise AssertionError("there is no such checkpoint")


def _store_without_steps(ctx: core.Context) -> None:
    with ctx.checkpoint.store_path({}):
        raise AssertionError("steps_completed is missing")


ALONE: dict[str, tuple[type[BaseException], Failure]] = {
    "`from_torch_distributed()` without a launcher": (
        KeyError,
        lambda ctx, path: core.DistributedContext.from_torch_distributed(),
    ),
    "`from_deepspeed()` without a launcher": (KeyError, lambda ctx, path: core.DistributedContext.from_deepspeed()),
    "`checkpoint_storage=` of another scheme": (
        ValueError,
        lambda ctx, path: core.init(checkpoint_storage="nosuch://bucket"),
    ),
    "`upload(None)` without `shard=True`": (
        RuntimeError,
        lambda ctx, path: ctx.checkpoint.upload(None, {"steps_completed": 1}),
    ),
    "`store_path()`, `upload()` without `steps_completed`": (ValueError, lambda ctx, path: _store_without_steps(ctx)),
    "`restore_path()`, `download()` of no checkpoint": (
        errors.CheckpointNotFound,
        lambda ctx, path: _restore(ctx, "00000000-0000-0000-0000-000000000000"),
    ),
    "`report_completed()` twice": (RuntimeError, lambda ctx, path: _complete_twice(ctx)),
    "`op.report_progress()` after `report_completed()`": (
        RuntimeError,
        lambda ctx, path: _progress_after_completion(ctx),
    ),
    "the next operation without `report_completed()`": (
        RuntimeError,
        lambda ctx, path: [op for op in ctx.searcher.operations()],
    ),
    "`train.report_progress()` outside 0 to 1": (ValueError, lambda ctx, path: ctx.train.report_progress(2)),
    "`profiler.on()` with an interval below 0.1": (
        ValueError,
        lambda ctx, path: ctx.profiler.on(sampling_interval=0),  # type: ignore[arg-type]
    ),
    "`upload_tensorboard_files()` in the mode AUTO": (
        RuntimeError,
        lambda ctx, path: ctx.train.upload_tensorboard_files(),
    ),
    "`alert()` with an unknown level": (ValueError, lambda ctx, path: ctx.alert("title", level="nosuch")),
}
"""Failures on one rank: what fails, the exception there, and how to provoke it."""

ON_TWO_RANKS: dict[str, type[BaseException]] = {
    "`upload()`, `store_path()` of a worker without `shard=True`": RuntimeError,
    "`should_preempt()` of a worker in the mode ChiefOnly": RuntimeError,
    "`operations()` of a worker in the mode ChiefOnly": RuntimeError,
    "ranks with different files under one name": RuntimeError,
    "ranks that call different collectives": RuntimeError,
}


@pytest.mark.parametrize("failure", ALONE)
def test_failure_on_one_rank_raises_determined_kind(failure: str, tmp_path: Path) -> None:
    kind, provoke = ALONE[failure]
    with core.init(tensorboard_mode=core.TensorboardMode.AUTO) as ctx:
        with pytest.raises(kind) as caught:
            provoke(ctx, tmp_path)
        assert str(caught.value)


def _on_a_worker(call: Callable[[core.Context], Any]) -> None:
    def work(distributed: core.DistributedContext) -> None:
        mode = core.PreemptMode.ChiefOnly
        with core.init(distributed=distributed, preempt_mode=mode) as ctx:
            if distributed.rank == 1:
                with pytest.raises(RuntimeError):
                    call(ctx)
            distributed.barrier()

    as_ranks(2, work)


def test_calls_of_a_worker_raise_runtime_errors(tmp_path: Path) -> None:
    _on_a_worker(lambda ctx: ctx.checkpoint.upload(tmp_path, {"steps_completed": 1}))
    _on_a_worker(lambda ctx: ctx.preempt.should_preempt())
    _on_a_worker(lambda ctx: ctx.searcher.operations(core.SearcherMode.ChiefOnly))


def test_ranks_that_disagree_raise_runtime_errors(tmp_path: Path) -> None:
    assert issubclass(errors.CheckpointConflict, RuntimeError)

    def different_collectives(distributed: core.DistributedContext) -> None:
        with pytest.raises(RuntimeError):
            if distributed.rank == 0:
                distributed.gather(1)
            else:
                distributed.allgather(1)

    as_ranks(2, different_collectives)


def test_missing_launcher_is_a_key_error_whose_text_is_readable() -> None:
    with pytest.raises(errors.LauncherNotFound, match=r"^not set: RANK") as caught:
        core.DistributedContext.from_torch_distributed()
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)


def test_moving_page_has_each_error() -> None:
    page = (ROOT / "docs/moving.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| `(\w+)` \| [^|]*\|$", page, re.MULTILINE))
    expected = {name: kind.__name__ for name, (kind, _) in ALONE.items()}
    expected |= {name: kind.__name__ for name, kind in ON_TWO_RANKS.items()}
    assert {name: rows.get(name) for name in expected} == expected
