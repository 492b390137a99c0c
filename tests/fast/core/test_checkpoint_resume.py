"""``resume()``: the newest checkpoint that is whole, what is said of those that are not, and never a new start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.errors import CheckpointCorrupt
from support.commands import det_core
from support.ranks import running


def save(ctx: core.Context, step: int) -> str:
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, storage_id):
        (path / "x").write_text(f"of step {step}")
    return storage_id


def saved(count: int) -> tuple[list[str], Path]:
    """The ids of a run's checkpoints, and the folder that they lie in."""
    with core.init(name="r") as ctx:
        with ctx.checkpoint.resume() as path:
            assert path is None
        ids = [save(ctx, step) for step in range(1, count + 1)]
        with ctx.checkpoint.restore_path(ids[0]) as path:
            return ids, path.parent


def flip(path: Path) -> None:
    """Change the bytes of a file, which is read-only, and not its size."""
    path.chmod(0o644)
    path.write_bytes(b"X" * path.stat().st_size)


@pytest.mark.parametrize("what", ["a file", "its manifest"])
@pytest.mark.parametrize("mode", list(core.DownloadMode))
def test_one_that_is_damaged_is_passed_over(
    what: str, mode: core.DownloadMode, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ids, store = saved(3)
    for storage_id in ids[1:]:
        flip(store / storage_id / ("x" if what == "a file" else ".det_core/manifest.json"))
    capfd.readouterr()
    with core.init(name="r", resume="latest") as ctx:
        for _ in range(2):
            with ctx.checkpoint.resume(mode) as path:
                assert path is not None and (path / "x").read_text() == "of step 1"
        if what == "a file":
            assert ctx.latest_checkpoint == ids[2]
            with pytest.raises(CheckpointCorrupt, match="x differs"), ctx.checkpoint.restore_path(ids[2], mode):
                pass
    said = capfd.readouterr().err + caplog.text
    assert all(storage_id in said for storage_id in ids[1:])
    if what == "a file":
        assert f"checkpoint {ids[2]} is passed over, and {ids[1]}, the one before, is taken: " in said
        assert said.count("x differs from its manifest") == 2, "each is told of once"


@pytest.mark.parametrize("what", ["x", ".det_core/manifest.json"])
def test_it_never_begins_anew_where_there_is_something(what: str) -> None:
    ids, store = saved(2)
    for storage_id in ids:
        flip(store / storage_id / what)
    with core.init(name="r", resume="latest") as ctx:
        with pytest.raises(CheckpointCorrupt, match=r"no checkpoint of run .* is whole: ") as caught:
            with ctx.checkpoint.resume():
                raise AssertionError("the block was entered")
        assert all(storage_id in str(caught.value) for storage_id in ids)


def test_the_last_line_says_what_helps_against_a_damaged_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    ids, store = saved(2)
    flip(store / ids[1] / "x")
    with pytest.raises(CheckpointCorrupt), core.init(name="r", resume="latest") as ctx:
        with ctx.checkpoint.restore_path(ids[1]):
            pass
    last = capsys.readouterr().err.splitlines()[-1]
    (command,) = re.findall(r"remove the damaged: det-core (.*); then DET_CORE_RESUME=", last)
    det_core(*command.replace("ID", ids[1]).split(), "--yes")
    with core.init(name="r", resume="latest") as ctx:
        assert ctx.latest_checkpoint == ids[0]


@pytest.mark.parametrize(
    "use", [lambda got: got / "x", lambda got: os.path.join(got, "x"), tuple, lambda got: got.exists()]
)
@pytest.mark.parametrize("call", ["store_path", "restore_path", "resume"])
def test_a_forgotten_with_is_named(call: str, use: Callable[[Any], Any]) -> None:
    with core.init() as ctx:
        argument = {"store_path": [{"steps_completed": 1}], "restore_path": ["x"], "resume": []}[call]
        with pytest.raises((TypeError, AttributeError), match=rf"in a with statement: with ctx\.checkpoint\.{call}\("):
            use(getattr(ctx.checkpoint, call)(*argument))


def test_what_was_deleted_is_no_reason_not_to_begin() -> None:
    (storage_id,), _ = saved(1)
    with core.init(name="r", resume="latest") as ctx:
        ctx.checkpoint.delete(storage_id)
    with core.init(name="r", resume="latest") as ctx, ctx.checkpoint.resume() as path:
        assert path is None


def test_what_the_block_raises_is_the_scripts() -> None:
    saved(2)
    with core.init(name="r", resume="latest") as ctx:
        with pytest.raises(CheckpointCorrupt, match="mine"), ctx.checkpoint.resume():
            raise CheckpointCorrupt("mine")


def test_a_checkpoint_that_is_none_names_resume() -> None:
    with core.init() as ctx:
        with pytest.raises(ValueError, match=r"ctx\.checkpoint\.resume\(\)"):
            with ctx.checkpoint.restore_path(ctx.latest_checkpoint):  # type: ignore[arg-type]
                pass


RANKS = """
from det_core import core
with core.init(distributed=core.DistributedContext.detect(), name="r", resume="latest") as ctx:
    with ctx.checkpoint.resume() as path:
        print("restored", (path / "x").read_text(), flush=True)
"""


def test_all_ranks_take_the_same(tmp_path: Path) -> None:
    ids, store = saved(2)
    flip(store / ids[1] / "x")
    with running(RANKS, 3, tmp_path) as ranks:
        assert ranks.wait() == [0, 0, 0], ranks.output(0)
        assert all("restored of step 1" in ranks.output(rank) for rank in range(3))
        assert ["passed over" in ranks.output(rank) for rank in range(3)] == [True, False, False]


@pytest.mark.parametrize("shard", [False, True])
def test_an_empty_block_is_one_warning(shard: bool, caplog: pytest.LogCaptureFixture) -> None:
    with core.init() as ctx:
        for step in range(2):
            with ctx.checkpoint.store_path({"steps_completed": step}, shard=shard) as (_, storage_id):
                pass
            if step == 0:
                assert f"checkpoint {storage_id} is empty: no file was written into its folder" in caplog.text
        assert caplog.text.count("is empty") == 1
