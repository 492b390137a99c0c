"""Outcome of a run in its last line and its record."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from support.ranks import running


def save(ctx: core.Context, step: int, **metadata: Any) -> None:
    with ctx.checkpoint.store_path({"steps_completed": step, **metadata}) as (path, _):
        (path / "file").write_text("x")


def train(ctx: core.Context, steps: range, *, saves: int | None = None) -> None:
    """Report steps, of which one is saved, and ask for a stop after the last."""
    for step in steps:
        ctx.train.report_training_metrics(step, {"loss": 1.0})
        if step == saves:
            save(ctx, step)
        if step == steps[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        ctx.preempt.should_preempt()


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda: capsys.readouterr().err.strip().splitlines()[-1]


def test_preemption_without_a_save_names_the_step_to_resume_from(last_line: Any) -> None:
    with core.init(name="a") as ctx:
        train(ctx, range(1, 3))
    line = last_line()
    assert "preempted (nothing was saved, so a resume starts from the beginning); to resume it: " in line
    assert client.run("latest").detail in line
    with core.init(name="a", resume="latest") as ctx:
        train(ctx, range(1, 6), saves=3)
    assert "preempted (nothing was saved since step 3, from which a resume continues)" in last_line()
    with core.init(name="a", resume="latest") as ctx:
        train(ctx, range(4, 8))
    assert "preempted (nothing was saved since step 3, from which a resume continues)" in last_line()


def test_preemption_after_which_the_script_saved_says_no_more(last_line: Any) -> None:
    with core.init() as ctx:
        train(ctx, range(1, 3), saves=2)
    assert " preempted; to resume it: " in last_line()
    with core.init() as ctx:  # reports count batches, checkpoints count epochs
        train(ctx, range(1, 30))
        save(ctx, 1)
    assert " preempted; to resume it: " in last_line()


def test_stop_without_a_save_is_printed(last_line: Any) -> None:
    with core.init() as ctx:
        ctx.preempt.should_preempt()
        ctx.train.report_training_metrics(1, {"loss": 1.0})
        ctx.preempt.request("converged")
        assert ctx.preempt.should_preempt()
    assert "stopped by the script: converged; nothing was saved, so a resume starts" in last_line()


@pytest.mark.parametrize("call", ["store_path", "store_path in the background", "save", "upload"])
def test_checkpoint_aborted_for_an_exit_is_printed(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    with pytest.raises(SystemExit), core.init() as ctx:
        if call.startswith("store_path"):
            with ctx.checkpoint.store_path({"steps_completed": 9}, blocking=call == "store_path"):
                leave()
        elif call == "save":
            pytest.importorskip("torch")
            monkeypatch.setattr("det_core.core._checkpoint._snapshot.write_state", leave)
            ctx.checkpoint.save({}, {"steps_completed": 9})
        else:
            monkeypatch.setattr("det_core.core._checkpoint._context.write_shards", leave)
            ctx.checkpoint.upload(tmp_path / "folder", {"steps_completed": 9})
    assert "the checkpoint of step 9 was given up: SystemExit before it was complete" in capsys.readouterr().err
    assert client.run("latest").checkpoints() == []


def test_closed_generator_has_not_failed(last_line: Any) -> None:
    def steps() -> Iterator[int]:
        with core.init() as ctx:
            for step in range(1, 9):
                ctx.train.report_training_metrics(step, {"loss": 1.0})
                save(ctx, step)
                yield step

    running = steps()
    for step in running:
        if step == 3:
            break
    running.close()
    assert "stopped by the script: its generator was closed before the end; to resume it: " in last_line()
    assert client.run("latest").state == "stopped"


def test_run_folder_moved_is_found_at_the_next_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 3600.0)
    with core.init(name="a") as ctx:
        ctx.train.report_training_metrics(1, {"loss": 1.0})
        save(ctx, 1)
        (home / "runs" / ctx.run_id).rename(home / "elsewhere")
        ctx.train.report_training_metrics(2, {"loss": 1.0})
        save(ctx, 2)
        assert "while it was written" in caplog.text
        ctx.train.report_training_metrics(3, {"loss": 1.0})
    (run,) = client.runs()
    assert (run.name, run.state) == ("a", "completed")
    assert [row.steps_completed for row in run.rows("training")] == [1, 2, 3]
    with core.init(name="a", resume="latest") as ctx:
        assert ctx.steps_completed == 2
        with ctx.checkpoint.resume() as path:
            assert path is not None
    assert caplog.text.count("while it was written") == 1


def test_truncated_journal_makes_a_run_incomplete(last_line: Any, home: Path) -> None:
    with core.init() as ctx:
        ctx.train.report_training_metrics(1, {"loss": 1.0})
        os.truncate(home / "runs" / ctx.run_id / "journal-0-0.jsonl", 0)
        ctx.train.report_training_metrics(2, {"loss": 1.0})
    assert "incomplete (not all reports were kept: the journal was truncated by another process)" in last_line()
    assert client.run("latest").state == "incomplete"


def test_failure_below_a_foreign_launcher_says_that_it_is_needed_again(tmp_path: Path) -> None:
    script = """
    from det_core import core
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL):
        raise RuntimeError("over")
    """
    with running(script, 2, tmp_path) as ranks:
        assert ranks.wait() == [1, 1]
        assert "; to resume it by the launcher of its 2 ranks: DET_CORE_RESUME=" in ranks.output(0)
