"""Whole checks of a trial, which a master of the check stops and starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fast.check_resume.test_check import WALK
from support import warm
from support.commands import det_core
from support.leftovers import processes_of

EXPERIMENT = """
name: walk
entrypoint: [PYTHON, walk.py]
searcher: {name: single, metric: x}
checkpoint_storage: {type: shared_fs, host_path: /nowhere/at/all}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a script and an experiment file."""
    folder = tmp_path / "project"
    folder.mkdir()
    manual = "core.init(tensorboard_mode=core.TensorboardMode.MANUAL, "  # else torch is imported
    (folder / "walk.py").write_text(WALK.replace("core.init(", manual))
    (folder / "walk.yaml").write_text(EXPERIMENT.replace("PYTHON", warm.python(warm.HERE)))
    monkeypatch.chdir(folder)
    return folder


def test_trial_that_resumes_exactly_is_equal_and_leaves_nothing(
    project: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = det_core("check-resume", "--", "det-core", "experiment", "create", "walk.yaml", ".")
    title, _, remark, *_ = done.stdout.splitlines()
    assert title == "### `det-core experiment create walk.yaml .` resumes exactly"
    assert remark == "- remark: after its end: not checked, since a master never starts a completed trial again"
    assert "| stopped | 0, 0 | 1 | 12 | 4 | 5 | 6 |" in done.stdout
    assert "| killed | signal 9, 0 | 1 | 12 | 3 | 4 | 5 |" in done.stdout
    assert "training 2 of 4, stopped after step 5, resumed\n" in done.stderr
    assert not home.exists(), "the user's home is not touched"
    assert list(tmp_path.iterdir()) == [project]
    assert not processes_of(tmp_path), "its master has ended"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment", "create", "none.yaml"], "File 'none.yaml' does not exist"),
        (["e", "create", "walk.yaml", "--config", "searcher.name=nine"], "searcher.name"),
        (
            ["run", "--config", "searcher={name: random, metric: x, max_trials: 2}", "--", "true"],
            "searcher.name is random: check-resume checks an experiment with one trial, searcher.name: single",
        ),
        (["run", "--master", "http://127.0.0.1:1", "--", "true"], "leave out --master and --home"),
        (["run"], "command to run: det-core run -- python train.py"),
        (["experiment", "list"], "`det-core experiment list` trains nothing"),
    ],
)
def test_command_whose_trial_cannot_be_checked_is_refused(project: Path, words: list[str], message: str) -> None:
    assert message in det_core("check-resume", "--", "det-core", *words, check=2).stderr
