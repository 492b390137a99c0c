from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from det_core import InvalidHP, client, core
from det_core.errors import CloseError, PeerLost, RunLocked, RunNotFound
from det_core.journal import RunRecord, read_run
from support import warm
from support.commands import det_core
from support.ranks import running
from support.threads import as_ranks


def _run(home: Path) -> RunRecord:
    (folder,) = (home / "runs").iterdir()
    return read_run(folder)


def test_context_notices_have_the_command_to_resume(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with core.init() as ctx:
        run_id = ctx.run_id
    first, *_, last = capsys.readouterr().err.strip().splitlines()
    assert run_id in first and str(home / "runs" / run_id) in first
    assert run_id in last and "completed" in last
    with pytest.raises(ValueError, match="mine"), core.init(resume=run_id):
        raise ValueError("mine")
    *_, first, last = capsys.readouterr().err.strip().splitlines()
    assert "started again (restart 1)" in first
    assert f"DET_CORE_RESUME={run_id}" in last and "failed (ValueError: mine)" in last


def test_context_user_error_is_raised_unchanged(home: Path) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as e, core.init():
        raise error
    assert e.value is error
    assert _run(home).state == "failed"


def test_close_failing_part_does_not_keep_others_open(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = core.init()
    ctx.train.report_training_metrics(1, {"loss": 1.0})

    def broken() -> None:
        raise OSError("the profiler's disk is gone")

    monkeypatch.setattr(ctx.profiler, "close", broken)
    with pytest.raises(CloseError) as e:
        ctx.close()
    assert "profiler: OSError: the profiler's disk is gone" in str(e.value)
    assert list(e.value.failures) == ["profiler"]
    assert _run(home).rows("training")[0].metrics == {"loss": 1.0}
    core.init(resume=ctx.run_id).close()  # the lock is free
    ctx.close()  # closing again is nothing


def test_close_failure_does_not_hide_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mine") as e, core.init() as ctx:
        monkeypatch.setattr(ctx.profiler, "close", lambda: 1 / 0)
        raise ValueError("mine")
    if sys.version_info >= (3, 11):
        assert "ZeroDivisionError" in e.value.__notes__[0]


def test_invalid_hp_on_single_rank_exits_with_status_0(home: Path) -> None:
    with pytest.raises(SystemExit) as e, core.init():
        raise InvalidHP("lr too large")
    assert e.value.code == 0
    run = _run(home)
    assert [r["reason"] for r in run.records("early_exit")] == ["INVALID_HP"]


INVALID = """
    import sys, time
    import det_core as det
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        distributed.allgather(None)
        if distributed.rank == 2:
            raise det.InvalidHP("no")
        step = 0
        while True:
            step += 1
            if distributed.rank == 0:
                ctx.train.report_training_metrics(step, {"loss": 1.0})
            elif distributed.rank == 1:
                ctx.preempt.should_preempt()
            else:
                distributed.channel("user").gather(step)
            time.sleep(0.001)
"""


def test_invalid_hp_of_one_rank_ends_all_with_status_0(home: Path, tmp_path: Path) -> None:
    with running(INVALID, 4, tmp_path) as ranks:
        assert ranks.wait() == [0, 0, 0, 0], "\n".join(ranks.output(r) for r in range(4))
    run = _run(home)
    assert len(run.records("early_exit")) == 1
    assert {r["outcome"] for r in run.records("run_end")} == {"invalid_hp"}
    assert run.state == "invalid_hp"
    assert "Traceback" not in "".join(ranks.output(r) for r in range(4) if r != 2)


def test_context_failed_rank_is_named_on_the_others() -> None:
    def rank(distributed: core.DistributedContext) -> str:
        with core.init(distributed=distributed) as ctx:
            if distributed.rank == 1:
                raise ValueError("out of data")
            with pytest.raises(PeerLost) as e:
                ctx.distributed.allgather(None)
            return str(e.value)

    said: list[str] = []

    def work(distributed: core.DistributedContext) -> None:
        try:
            said.append(rank(distributed))
        except ValueError as e:
            assert str(e) == "out of data"

    as_ranks(2, work)
    assert "rank 1" in said[0] and "out of data" in said[0]


def test_init_run_in_use_names_its_writer() -> None:
    import os
    import socket

    with core.init(name="one") as ctx:
        with pytest.raises(RunLocked) as e:
            core.init(resume=ctx.run_id)
        assert str(os.getpid()) in str(e.value) and socket.gethostname() in str(e.value)


def test_init_error_of_the_chief_is_raised_on_every_rank() -> None:
    def rank(distributed: core.DistributedContext) -> str:
        with pytest.raises(RunNotFound) as e:
            core.init(distributed=distributed, resume="no-such-run")
        return str(e.value)

    said = as_ranks(3, rank)
    assert "no-such-run" in said[0]
    assert said[1:] == [f"rank 0: {said[0]}"] * 2


def test_resume_latest_uses_name_and_starts_new_without_one() -> None:
    with core.init(name="a", resume="latest") as a:
        assert a.latest_checkpoint is None
    with core.init(name="b") as b:
        pass
    with core.init(name="a", resume="latest") as again:
        assert again.run_id == a.run_id != b.run_id


def test_resume_variable_selects_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with core.init() as first:
        pass
    monkeypatch.setenv("DET_CORE_RESUME", first.run_id)
    with core.init() as second:
        assert second.run_id == first.run_id


def test_latest_checkpoint_is_newest_of_this_run(tmp_path: Path) -> None:
    storage = str(tmp_path / "storage")
    with core.init(name="a", checkpoint_storage=storage) as ctx:
        assert ctx.latest_checkpoint is None
        for step in (1, 2):
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, newest):
                (path / "f").write_text(str(step))
    with core.init(name="other", checkpoint_storage=storage) as ctx:
        with ctx.checkpoint.store_path({"steps_completed": 9}) as (path, _):
            (path / "f").write_text("9")
    with core.init(name="a", checkpoint_storage=storage, resume="latest") as ctx:
        assert ctx.latest_checkpoint == newest
        with ctx.checkpoint.restore_path(newest) as path:
            assert (path / "f").read_text() == "2"
        ctx.checkpoint.delete(newest)
    with core.init(name="a", checkpoint_storage=storage, resume="latest") as ctx:
        assert ctx.latest_checkpoint not in (None, newest)


def test_restore_supersedes_later_rows(home: Path) -> None:
    with core.init(name="s") as ctx:
        for step in range(1, 6):
            ctx.train.report_training_metrics(step, {"loss": 1.0})
            if step == 3:
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "f").write_text("x")
    with core.init(name="s", resume="latest") as ctx:
        assert ctx.latest_checkpoint is not None
        with ctx.checkpoint.restore_path(ctx.latest_checkpoint):
            pass
        for step in range(4, 7):
            ctx.train.report_training_metrics(step, {"loss": 2.0})
    run = _run(home)
    assert [(row.steps_completed, row.metrics["loss"]) for row in run.rows("training")] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)
    ]  # fmt: skip
    assert len(run.rows("training", superseded=True)) == 8


def test_restore_of_another_runs_checkpoint_supersedes_nothing(home: Path, tmp_path: Path) -> None:
    storage = str(tmp_path / "storage")
    with core.init(name="pretrained", checkpoint_storage=storage) as ctx:
        with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, pretrained):
            (path / "f").write_text("x")
    with core.init(name="fine", checkpoint_storage=storage) as ctx:
        for step in (1, 2, 3):
            ctx.train.report_training_metrics(step, {"loss": 1.0})
        fine = ctx.run_id
    with core.init(name="fine", checkpoint_storage=storage, resume="latest") as ctx:
        with ctx.checkpoint.restore_path(pretrained):
            pass
    assert len(read_run(home / "runs" / fine).rows("training")) == 3


@pytest.mark.parametrize(("level", "logged"), [("info", "INFO"), ("WARN", "WARNING"), ("error", "ERROR")])
def test_alert(home: Path, caplog: pytest.LogCaptureFixture, level: str, logged: str) -> None:
    caplog.set_level("DEBUG", logger="det_core")
    with core.init() as ctx:
        ctx.alert("disk", "is nearly full", level)
        with pytest.raises(ValueError, match="level="):
            ctx.alert("x", level="loud")
        with pytest.raises(ValueError, match="title"):
            ctx.alert()
    assert [(r.levelname, r.getMessage()) for r in caplog.records if "disk" in r.getMessage()] == [
        (logged, "disk: is nearly full")
    ]
    assert _run(home).records("alert")[0]["title"] == "disk"


def test_report_from_several_threads_keeps_every_row(home: Path) -> None:
    with core.init() as ctx:

        def report(group: str) -> None:
            for step in range(200):
                ctx.train.report_metrics(group, step, {"x": step})

        threads = [threading.Thread(target=report, args=(f"g{i}",)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    run = _run(home)
    assert all([row.steps_completed for row in run.rows(f"g{i}")] == list(range(200)) for i in range(4))


FAILS = """
    from contextlib import suppress
    from det_core import core
    from det_core.errors import PeerLost

    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        distributed.allgather(None)
        if distributed.rank == 1:
            raise ValueError("my bug")
        with suppress(PeerLost):
            distributed.raise_if_peer_failed(within=600)
"""


def test_run_with_one_failed_rank_is_not_completed(home: Path, tmp_path: Path) -> None:
    with running(FAILS, 2, tmp_path) as ranks:
        ranks.wait()
    assert _run(home).state == "failed"
    assert "failed (rank 1: ValueError: my bug)" in ranks.output(0), "the chief says so though it has ended well itself"


def test_run_with_one_rank_dead_at_its_end_is_not_completed(home: Path, tmp_path: Path) -> None:
    code = FAILS.replace('raise ValueError("my bug")', "import os, time; time.sleep(1); os._exit(1)")
    code = code.replace("within=600", "within=0")
    with running(code, 2, tmp_path) as ranks:
        ranks.wait()
    assert _run(home).state == "died"


def test_resume_with_other_arguments_prints_notices(capsys: pytest.CaptureFixture[str]) -> None:
    with core.init(name="a", resume="latest"):
        pass
    assert "no earlier run named a in" in capsys.readouterr().err
    with core.init(name="a", resume="latest") as ctx:
        run_id = ctx.run_id
    assert "named" not in capsys.readouterr().err
    with core.init(name="b", resume=run_id):
        pass
    assert "was named a before, and is named b now" in capsys.readouterr().err

    def rank(distributed: core.DistributedContext) -> None:
        core.init(distributed=distributed, name="a", resume=run_id).close()

    as_ranks(2, rank)
    assert "had 1 rank(s) before, and has 2 now" in capsys.readouterr().err


def test_resume_of_completed_run_prints_its_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from det_core import core\ncore.init(name='a', resume='latest').close()\n")
    assert "had completed" not in warm.run(["train.py", "--epochs", "1"], cwd=tmp_path).stdout
    again = warm.run(["train.py", "--epochs", "1"], cwd=tmp_path).stdout
    assert "had completed, with the same command" in again
    other = warm.run(["train.py", "--epochs", "2"], cwd=tmp_path).stdout
    assert "had completed, as: python train.py --epochs 1; resuming as: python train.py --epochs 2" in other
    (tmp_path / "train.py").write_text("from det_core import core\nwith core.init(name='a', resume='latest'): 1 / 0\n")
    warm.run(["train.py"], cwd=tmp_path)
    assert "was started, as: python train.py; resuming as" in warm.run(["train.py", "x"], cwd=tmp_path).stdout


def test_run_record_has_command_and_directory(home: Path, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    (tmp_path / "train.py").write_text("from det_core import core\ncore.init(name='a', resume='latest').close()\n")

    def start(*words: str) -> dict[str, Any]:
        warm.run(["train.py", *words], cwd=tmp_path)
        return _run(home).last_start

    first = start()
    assert (first["argv"], first["cwd"], first["git"]) == (["python", "train.py"], str(tmp_path), None)
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert start("--lr", "1")["git"] == {"commit": commit, "dirty": False}
    with open(tmp_path / "train.py", "a") as script:
        script.write("# changed\n")
    last = start("--lr", "2")
    assert (last["argv"], last["git"]) == (["python", "train.py", "--lr", "2"], {"commit": commit, "dirty": True})
    assert f" {commit}, with changes\n" in det_core("runs", "show", "latest").stdout
    assert [each["argv"][2:] for each in _run(home).info["restarts"]] == [[], ["--lr", "1"], ["--lr", "2"]]


def test_set_config_and_hparams_are_recorded(home: Path) -> None:
    hparams = {"lr": 0.1, "model": {"depth": 2}, "data": Path("/data")}
    with core.init(hparams=hparams) as ctx:
        assert (ctx.hparams, ctx.config) == (hparams, None)
        ctx.set_config({"seed": 1})
        ctx.set_config({"seed": 2, "device": object})
        assert ctx.config == {"seed": 2, "device": object}
        with pytest.raises(TypeError, match="config must be a mapping, not int"):
            ctx.set_config(3)  # type: ignore[arg-type]
    run = client.run("latest", home)
    assert run.hparams == {"lr": 0.1, "model": {"depth": 2}, "data": "/data"}
    assert run.config == {"seed": 2, "device": "<class 'object'>"}


def test_keyboard_interrupt_is_the_outcome(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), core.init():
        raise KeyboardInterrupt
    assert _run(home).state == "interrupted"
    assert "interrupted; to resume it" in capsys.readouterr().err


WRAPPERS = {
    "sets sys.argv": "import sys\nsys.argv = ['fit', '--lr', '1']\nimport train\n",
    "takes its own options away": "import sys\ndel sys.argv[1:]\nimport train\n",
    "runs another script": "import runpy, sys\ndel sys.argv[0]\nrunpy.run_path('train.py', run_name='__main__')\n",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_resume_command_starts_the_wrapper_of_a_script(tmp_path: Path, wrapper: str) -> None:
    (tmp_path / "train.py").write_text("from det_core import core\nwith core.init():\n    raise SystemExit(3)\n")
    (tmp_path / "wrap.py").write_text(WRAPPERS[wrapper])
    words = ["wrap.py", "train.py", "--lr", "1"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    (command,) = re.findall(r"to resume it: DET_CORE_RESUME=\S+ (.*)", done.stderr)
    # What it runs as the main script can be started alone.
    assert command == " ".join(["python", *(words[1:] if wrapper == "runs another script" else words)])


def test_resume_command_is_the_typed_one(tmp_path: Path) -> None:
    (tmp_path / "counted").mkdir()
    for name in ("__init__.py", "here.py", "__main__.py"):
        (tmp_path / "counted" / name).write_text(
            "from det_core import core\nwith core.init():\n    raise SystemExit(3)\n"
        )
    (tmp_path / "counted" / "__init__.py").write_text("")
    for words in (["-m", "counted.here"], ["-m", "counted"], ["counted/here.py"]):
        done = warm.run([*words, "--lr", "1"], cwd=tmp_path)
        (command,) = re.findall(r"to resume it: DET_CORE_RESUME=\S+ (.*)", done.stdout)
        assert command == " ".join(["python", *words, "--lr", "1"])
