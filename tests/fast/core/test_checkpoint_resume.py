"""``resume()``: the newest intact checkpoint, messages about damaged ones, and never a new start."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from det_core import core
from det_core.core._checkpoint import StartCheckpoint
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from support.checkpoints import Recorder, alone, fill
from support.commands import det_core
from support.ranks import running
from support.removing import start_beside_remover
from support.servers import S3Server
from support.threads import as_ranks


def save(ctx: core.Context, step: int) -> str:
    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, storage_id):
        (path / "x").write_text(f"of step {step}")
    return storage_id


def saved(count: int, **options: Any) -> tuple[list[str], Path]:
    """Return the IDs of a run's checkpoints, and their directory."""
    with core.init(name="r", **options) as ctx:
        with ctx.checkpoint.resume() as path:
            assert path is None
        ids = []
        for step in range(1, count + 1):
            ctx.train.report_validation_metrics(step, {"loss": 1 / step})
            ids.append(save(ctx, step))
        with ctx.checkpoint.restore_path(ids[0]) as path:
            return ids, path.parent


def flip(path: Path) -> None:
    """Change the bytes of a file, which is read-only, and not its size."""
    path.chmod(0o644)
    path.write_bytes(b"X" * path.stat().st_size)


DAMAGE = {
    "a file": lambda folder: flip(folder / "x"),
    "its manifest": lambda folder: flip(folder / ".det_core" / "manifest.json"),
    "all of it": shutil.rmtree,
}


@pytest.mark.parametrize("what", list(DAMAGE))
@pytest.mark.parametrize("mode", list(core.DownloadMode))
def test_start_damaged_or_gone_every_answer_is_the_one_before(
    what: str, mode: core.DownloadMode, capfd: pytest.CaptureFixture[str]
) -> None:
    ids, store = saved(3)
    for storage_id in ids[1:]:
        DAMAGE[what](store / storage_id)
    capfd.readouterr()
    with core.init(name="r", resume="latest") as ctx:
        assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (ids[0], 1, 1)
        for _ in range(2):
            with ctx.checkpoint.resume(mode) as path:
                assert path is not None and (path / "x").read_text() == "of step 1"
        assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (ids[0], 1, 1)
        with pytest.raises((CheckpointCorrupt, CheckpointNotFound)), ctx.checkpoint.restore_path(ids[2], mode):
            pass
    said = capfd.readouterr().err
    assert f"; newest checkpoint: {ids[0]}\n" in said
    passed = f"checkpoint {ids[0]} is taken, and newer ones are passed over: "
    (line,) = [line for line in said.splitlines() if passed in line]
    assert all(line.count(storage_id) == 1 for storage_id in ids)


@pytest.mark.parametrize("kind", ["x", ".det_core/manifest.json", None])
def test_resume_without_intact_checkpoint_never_begins_anew(
    kind: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    ids, store = saved(2)
    for storage_id in ids:
        if kind is None:
            shutil.rmtree(store / storage_id)
        else:
            flip(store / storage_id / kind)
    error = CheckpointNotFound if kind is None else CheckpointCorrupt
    with core.init(name="r", resume="latest") as ctx:
        with pytest.raises(error, match=r"no checkpoint of run .* is intact: ") as caught:
            with ctx.checkpoint.resume():
                raise AssertionError("the block was entered")
        assert all(storage_id in str(caught.value) for storage_id in ids)
        assert ctx.latest_checkpoint == ids[1], "None would have the script begin anew"
    assert str(caught.value) in capfd.readouterr().err, "said when the run was opened"


@pytest.mark.parametrize("read_before", [False, True])
def test_start_damaged_after_init_is_replaced_unless_its_steps_were_read(read_before: bool) -> None:
    ids, store = saved(2)
    with core.init(name="r", resume="latest") as ctx:
        (store / ids[1] / "x").unlink()
        take_the_one_before(ctx, ids, read_before)


@pytest.mark.parametrize(("what", "read_before"), [("damaged", False), ("damaged", True), ("gone", False)])
def test_start_in_a_bucket_is_replaced_unless_its_steps_were_read(
    what: str, read_before: bool, moto_server: S3Server
) -> None:
    """The digests are compared when the bytes are fetched, so that nothing is fetched twice."""
    bucket = moto_server.make_bucket()
    storage = moto_server.storage(bucket)
    ids, _ = saved(2, checkpoint_storage=storage)
    with moto_server.client() as client:
        if what == "damaged":
            client.put_object(Bucket=bucket, Key=f"{ids[1]}/x", Body=b"of step 9")
        else:
            for name in ("x", "metadata.json", ".det_core/manifest.json"):
                client.delete_object(Bucket=bucket, Key=f"{ids[1]}/{name}")
    with core.init(name="r", resume="latest", checkpoint_storage=storage) as ctx:
        if what == "gone":
            assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (ids[0], 1, 1)
        take_the_one_before(ctx, ids, read_before)
    if read_before:  # the next start compares the bytes before it answers
        with core.init(name="r", resume="latest", checkpoint_storage=storage) as ctx:
            assert (ctx.latest_checkpoint, ctx.steps_completed) == (ids[0], 1)
            with ctx.checkpoint.resume() as path:
                assert path is not None and (path / "x").read_text() == "of step 1"


def take_the_one_before(ctx: core.Context, ids: list[str], read_before: bool) -> None:
    """Resume where the newest is damaged, and was not found to be when the run was opened."""
    if not read_before:
        with ctx.checkpoint.resume() as path:
            assert path is not None and (path / "x").read_text() == "of step 1"
        assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (ids[0], 1, 1)
        return
    assert (ctx.latest_checkpoint, ctx.steps_completed) == (ids[1], 2)
    with pytest.raises(CheckpointCorrupt, match=r"x .*no older one is taken, as this script has .* read"):
        with ctx.checkpoint.resume():
            raise AssertionError("the block was entered")


@pytest.mark.parametrize("whose", ["another's", "its own"])
def test_unreadable_checkpoint_is_an_error_only_where_it_is_the_newest_of_the_run(whose: str, tmp_path: Path) -> None:
    ids, _ = saved(2, checkpoint_storage=tmp_path / "store")
    manifest = tmp_path / "store" / ("theirs" if whose == "another's" else ids[1]) / ".det_core" / "manifest.json"
    manifest.unlink(missing_ok=True)
    manifest.mkdir(parents=True)
    if whose == "its own":
        with pytest.raises(StorageError, match=ids[1]):
            core.init(name="r", resume="latest", checkpoint_storage=tmp_path / "store")
        return
    with core.init(name="r", resume="latest", checkpoint_storage=tmp_path / "store") as ctx:
        with ctx.checkpoint.resume() as path:
            assert path is not None and ctx.latest_checkpoint == ids[1]


def test_steps_of_manifest_and_metadata_that_contradict_are_damage(capfd: pytest.CaptureFixture[str]) -> None:
    """An earlier version's manifest has no digest of its own: one flipped bit made step 1 of 2."""
    ids, store = saved(2)
    path = store / ids[1] / ".det_core" / "manifest.json"
    body = json.loads(path.read_text())
    del body["digest"], body["content"]
    path.chmod(0o644)
    path.write_bytes(orjson.dumps({**body, "steps_completed": 600}))
    assert f"{ids[1]}  damaged" in det_core("checkpoint", "verify", ids[1], check=1).stdout
    with core.init(name="r", resume="latest") as ctx:
        assert (ctx.latest_checkpoint, ctx.steps_completed) == (ids[0], 1)
    assert "its manifest says steps_completed 600, and metadata.json says 2" in capfd.readouterr().err


def test_the_last_line_says_what_helps_against_a_damaged_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    ids, store = saved(2)
    flip(store / ids[1] / "x")
    with pytest.raises(CheckpointCorrupt), core.init(name="r", resume="latest") as ctx:
        with ctx.checkpoint.restore_path(ids[1]):
            pass
    last = capsys.readouterr().err.splitlines()[-1]
    (command,) = re.findall(r"remove the damaged: det-core (.*); then ", last)
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
    print("starts at", ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation, flush=True)
    with ctx.checkpoint.resume() as path:
        print("restored", (path / "x").read_text(), flush=True)
"""


@pytest.mark.parametrize("what", ["a file", "all of it"])
def test_all_ranks_take_the_same(what: str, tmp_path: Path) -> None:
    ids, store = saved(2)
    DAMAGE[what](store / ids[1])
    with running(RANKS, 3, tmp_path) as ranks:
        assert ranks.wait() == [0, 0, 0], ranks.output(0)
        for rank in range(3):
            assert f"starts at {ids[0]} 1 1\n" in ranks.output(rank)
            assert "restored of step 1" in ranks.output(rank)
        assert ["passed over" in ranks.output(rank) for rank in range(3)] == [True, False, False]


def test_start_in_a_directory_of_the_chiefs_machine_is_checked_by_the_chief(tmp_path: Path) -> None:
    """Scripts that restore on the chief alone need no directory that all ranks see."""
    with alone() as distributed:
        writer = Recorder().context(distributed, tmp_path / "store")
        ids = [writer.upload(fill(tmp_path / "source"), {"steps_completed": step}) for step in (1, 2)]
    flip(tmp_path / "store" / ids[1] / "rng")

    def resume(distributed: core.DistributedContext) -> tuple[str | None, int, list[str]]:
        start, recorder = StartCheckpoint(ids[1], 2), Recorder()
        root = tmp_path / ("store" if distributed.rank == 0 else "elsewhere")
        context = recorder.context(distributed, root, restart=1, start=start)
        context.choose_start()
        if distributed.rank == 0:
            with context.resume(core.DownloadMode.NoSharedDownload) as path:
                assert path == tmp_path / "store" / ids[0]
        return start.storage_id, start.steps_completed, recorder.said

    for storage_id, steps, said in as_ranks(2, resume):
        assert (storage_id, steps) == (ids[0], 1)
        assert len(said) == 1 and "rng differs" in said[0]


def test_no_start_fails_while_another_process_removes_all_but_one() -> None:
    """``tests/long`` has 200 rounds."""
    start_beside_remover(10)


@pytest.mark.parametrize("shard", [False, True])
def test_an_empty_block_is_one_warning(shard: bool, caplog: pytest.LogCaptureFixture) -> None:
    with core.init() as ctx:
        for step in range(2):
            with ctx.checkpoint.store_path({"steps_completed": step}, shard=shard) as (_, storage_id):
                pass
            if step == 0:
                assert f"checkpoint {storage_id} is empty: no file was written into its folder" in caplog.text
        assert caplog.text.count("is empty") == 1
