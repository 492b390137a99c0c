"""Whole checks of scripts without torch, whose starts cost little."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from det_core.check_resume import check_resume
from det_core.check_resume._records import read_training
from det_core.check_resume._trainings import Home
from support import warm
from support.commands import det_core

WALK = """
import json, random
from det_core import core

random.seed(1)
x = 0.0
with core.init(name="walk", resume="latest", checkpoint_storage="elsewhere") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = json.loads((path / "walk.json").read_text())
            x = saved["x"]
            core.set_random_state({"python": saved["random"]})
    for step in range(ctx.steps_completed + 1, 13):
        x += random.gauss(0, 1)
        ctx.train.report_training_metrics(step, {"x": x, "seconds": random.SystemRandom().random()})
        stop = ctx.preempt.should_preempt()
        if stop or step % 4 == 0:
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "walk.json").write_text(json.dumps({"x": x, "random": random.getstate()}))
        if stop:
            break
"""
LIMIT = 1.0
"""Seconds for a start that never ends."""
RESUME = WALK[WALK.index("    with ctx.checkpoint.resume") : WALK.index("    for step")]


@pytest.fixture
def python() -> str:
    """Return a python that starts at once."""
    return warm.python(warm.HERE)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script that resumes exactly, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "walk.py"
    path.write_text(WALK)
    return path


def test_exact_script_is_equal_and_leaves_nothing(script: Path, home: Path, python: str) -> None:
    done = det_core("check-resume", "--", python, script.name)
    assert done.stdout.startswith(f"### `{python} walk.py` resumes exactly\n")
    assert "| stopped | 0, 0 | 1 | 12 | 4 | 5 | 6 |" in done.stdout
    assert "| killed | signal 9, 0 | 1 | 12 | 3 | 4 | 5 |" in done.stdout
    assert "training 2 of 5, stopped, requested after step 5\n" in done.stderr
    assert "training 2 of 5, stopped after step 5, resumed\n" in done.stderr
    assert not home.exists()
    assert list(script.parent.iterdir()) == [script], "the script's own checkpoint_storage is not written"


def test_name_with_the_time_makes_several_runs(script: Path, python: str) -> None:
    script.write_text(
        WALK.replace('"walk", resume', 'f"walk-{time.time_ns()}", resume').replace("random\n", "random, time\n", 1)
    )
    done = det_core("check-resume", "--json", "--", python, script.name, check=1)
    assert json.loads(done.stdout)["findings"][0]["cause"] == "several_runs"


def test_check_that_proves_little_says_so(script: Path, python: str) -> None:
    script.write_text(WALK.replace("random.gauss(0, 1)", "0"))
    done = det_core("check-resume", "--at", "2", "--json", "--", python, script.name)
    assert json.loads(done.stdout)["remarks"] == [
        "killed before the first checkpoint, so it started over; --at STEP chooses a later step",
        "every row of group training has the same values, so that no mistake would show in them: report a loss that "
        "changes",
    ]


def test_script_that_never_asks_is_found_and_its_homes_stay(script: Path, tmp_path: Path, python: str) -> None:
    script.write_text(WALK.replace(RESUME, "").replace("ctx.steps_completed + 1", "1"))
    done = det_core("check-resume", "--keep", "homes", "--json", "--", python, script.name, check=1)
    report = json.loads(done.stdout)
    assert not report["equal"]
    assert [(finding["cause"], finding["trainings"]) for finding in report["findings"]] == [
        ("never_asked", ["stopped", "killed"])
    ]
    assert report["findings"][0]["step"] == 1
    assert [run["training"] for run in report["runs"]] == [
        "undisturbed", "undisturbed again", "stopped", "killed", "after its end",
    ]  # fmt: skip
    assert report["folder"] == str(tmp_path / "homes")
    assert (tmp_path / "homes" / "stopped" / "start-1" / "output.txt").exists()


def test_script_without_seeds_is_compared_by_its_counts(script: Path, tmp_path: Path, python: str) -> None:
    script.write_text(WALK.replace("random.seed(1)", ""))
    report = check_resume([python, str(script)], tmp_path / "homes")
    assert [finding.cause for finding in report.findings] == ["undisturbed_runs_differ"]
    assert report.findings[0].step == 1


def test_script_without_should_preempt_is_checked_by_a_kill(script: Path, tmp_path: Path, python: str) -> None:
    script.write_text(WALK.replace("ctx.preempt.should_preempt()", "False"))
    command = [python, str(script)]
    assert [finding.cause for finding in check_resume(command, tmp_path / "a").findings] == ["never_stopped"]
    assert check_resume(command, tmp_path / "b", at=7, kill_only=True).is_equal


def test_script_that_reports_once_is_stopped_between_its_calls(script: Path, tmp_path: Path, python: str) -> None:
    report = "        ctx.train.report_training_metrics"
    script.write_text(WALK.replace(report, f"        if step == 12:\n    {report}"))
    checked = check_resume([python, str(script)], tmp_path / "homes", keep=True)
    assert checked.is_equal, checked.findings
    stopped = read_training("stopped", tmp_path / "homes" / "stopped", checked.trainings[2].starts)
    assert [save.steps_completed for save in stopped.saves] == [4, 6, 8, 12]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit('no data')", "the command ended with status 1: no data"),
        ("print('done')", "the command never called core.init()"),
        ("from det_core import core\ncore.init(name='x').close()", "the command reported no metrics"),
    ],
)
def test_script_that_cannot_be_compared_is_a_finding(
    script: Path, tmp_path: Path, text: str, said: str, python: str
) -> None:
    script.write_text(text)
    report = check_resume([python, str(script)], tmp_path / "homes")
    assert [(finding.cause, finding.text) for finding in report.findings] == [("command_failed", said)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command to run: det-core check-resume -- python train.py"),
        (["--keep", ".", "--", "true"], "--keep .: expected a folder that does not exist yet"),
    ],
)
def test_command_line_that_is_incomplete_is_refused(words: list[str], said: str) -> None:
    assert said in det_core("check-resume", *words, check=2).stderr


def test_command_that_does_not_exist_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "cannot run no-such-program: No such file" in det_core("check-resume", "no-such-program", check=1).stderr
    assert not list(tmp_path.glob("det_core-check-*"))


def test_hung_start_is_killed(script: Path, tmp_path: Path) -> None:
    script.write_text("from det_core import core\nimport time\nwith core.init(name='x'):\n    time.sleep(600)")
    start = Home(tmp_path / "home", [sys.executable, str(script)], lambda _step: None).run({}, timeout=LIMIT)
    assert start.is_hung
    assert start.status == -9
    assert read_training("x", tmp_path / "home", (start,)).runs <= 1


def test_processes_that_outlive_a_start_are_named_and_killed(script: Path, tmp_path: Path) -> None:
    script.write_text("import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)")
    start = Home(tmp_path / "home", [sys.executable, str(script)], lambda _step: None).run({})
    assert start.left == ("sleep 600",)
    assert start.status == 0
