"""The port of timm's training in five steps: every step bare, under the launcher and as an experiment."""

from __future__ import annotations

import difflib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.timm_steps import (
    ACCURACY,
    EXAMPLE,
    LENGTH,
    README,
    STEPS,
    Reader,
    assert_equal_bit_by_bit,
    commands,
    epochs_of,
    loaded,
    reader,
    short,
    timm_or_skip,
)  # fmt: skip

__all__ = ["reader"]


@pytest.fixture(scope="module")
def said(reader: Reader) -> dict[str, str]:
    """Return the output of the README's steps 0, 3 and 4; ``tests/long`` runs the others."""
    return reader.follows_all(short())


@pytest.fixture(scope="module")
def whole(reader: Reader) -> tuple[dict[str, Any], Any, Any]:
    """Step 3 to its end, never paused: its last checkpoint, and the metrics of training and validation."""
    return result_of(reader, reader.sees_completed(reader.creates("step3-checkpoints.yaml")))


def result_of(reader: Reader, told: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return the results of an ended experiment's trial, in the form of :func:`whole`."""
    (trial,) = told["trials"]
    assert trial["restarts"] == 0 and trial["steps_completed"] == 22 * LENGTH
    found = reader.fetches(told["id"], "--trial", str(trial["id"]))
    return found, reader.finds(trial["id"], "training"), reader.finds(trial["id"])


def changed(before: str, after: str) -> list[str]:
    """Return the lines that differ between two files, indentation aside, as diff shows them."""
    texts = [[line.strip() for line in (EXAMPLE / name).read_text().splitlines()] for name in (before, after)]
    lines = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@") and line[1:]]


def test_the_readme_shows_each_difference_as_it_is() -> None:
    shown = re.findall(r"```diff\n(.*?)```", README, re.S)
    pairs = list(itertools.pairwise(STEPS))
    assert len(shown) == len(pairs) == 4
    for text, (before, after) in zip(shown, pairs, strict=True):
        lines = [line[0] + line[1:].strip() for line in text.splitlines() if line[:1] in "+-"]
        assert [line for line in lines if line[1:]] == changed(f"{before}.py", f"{after}.py"), (before, after)


def test_consecutive_steps_differ_by_little() -> None:
    counts = [len(changed(f"{a}.py", f"{b}.py")) for a, b in itertools.pairwise(STEPS)]
    assert all(count <= most for count, most in zip(counts, (2, 15, 55, 20), strict=True)), counts
    assert [int(count) for count in re.findall(r"^\| \[`step.* \| (\d+) \|$", README, re.M)] == counts
    assert len((EXAMPLE / "step0-run.py").read_text().splitlines()) < 250
    assert "det_core" not in (EXAMPLE / "step1-distributed.py").read_text()


DIGITS = "import digits; print(digits.image_folder())"


def test_the_digits_are_written_once_by_however_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-c", DIGITS]
    jobs = [subprocess.Popen(command, cwd=EXAMPLE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4 and len(set(said)) == 1
    folder = Path(said[0].strip())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing is left of those who were slower
    for split, count in (("train", 1437), ("validation", 360)):
        assert len(list((folder / split).glob("[0-9]/*.png"))) == count
    made = folder.stat().st_mtime_ns
    subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True)
    assert folder.stat().st_mtime_ns == made


def test_the_readme_has_commands_for_each_step() -> None:
    for step in STEPS:
        assert any(re.match(rf".*python.* {step}\.py", command) for command, _ in commands())
        assert any(command.startswith(f"det-core experiment create {step}.yaml .") for command, _ in commands())
    assert [command.split()[2] for command, interrupted in commands() if interrupted] == [
        "det_core.launch.torch_distributed",
        "logs",
    ]


def test_step_0_as_the_readme_tells_it(said: dict[str, str]) -> None:
    """Without anything of det_core's in the script: bare, and as an experiment."""
    logs = [text for command, text in said.items() if re.search("step0.*py$|logs latest$", command)]
    assert len(logs) == 2
    for text in logs:
        epochs = epochs_of(text)
        assert [epoch["epoch"] for epoch in epochs] == list(range(LENGTH)) and epochs[-1]["val_top1"] > ACCURACY
    told = said["det-core experiment create step0-run.yaml . --follow"]
    assert "COMPLETED, 1 trial in" in told and "no trial has reported the metric 'val_loss'" in told


@pytest.mark.parametrize("step", STEPS[1:3])
def test_the_other_steps_run_bare(reader: Reader, step: str) -> None:
    done = reader.types("python", f"{step}.py", "--epochs", "1")
    (epoch,) = epochs_of(done.stderr)
    assert epoch["images_per_second"] > 0 and 0 < epoch["val_loss"] < 3
    assert "Training with a single process" in done.stderr
    runs = [run for run in reader.reads("runs", "list") if f"{step}.py" in run["name"]]
    assert [run["state"] for run in runs] == ["completed"] * (step == STEPS[2])


def test_step_3_is_paused_halfway_and_goes_on_to_the_last_bit(
    reader: Reader, said: dict[str, str], whole: tuple[dict[str, Any], Any, Any]
) -> None:
    told = reader.experiment("timm-step3")
    log = reader.types("det-core", "experiment", "logs", str(told["id"])).stdout
    assert log.count("Process 0, total 2") == 2  # it was started twice
    first, second = (epochs_of(part) for part in log.split("Process 0, total 2")[1:])
    assert [epoch["epoch"] for epoch in first + second] == list(range(LENGTH)) and first and second
    assert "det-core experiment pause latest" in said
    resumed = result_of(reader, told)
    assert resumed[1:] == whole[1:]
    assert_equal_bit_by_bit(resumed[0], whole[0])
    assert whole[0]["epoch"] == LENGTH - 1 and whole[0]["metric"] == whole[2][-1][1]["val_loss"]
    assert whole[2][-1][1]["val_top1"] > ACCURACY
    shown = loaded(reader.folder / "model" / "data")
    best = reader.experiment("timm-step3")["trials"][0]["best_metric"]
    assert shown["metric"] == best == min(values["val_loss"] for _, values in whole[2])


def test_step_3_is_interrupted_bare_and_goes_on_to_the_last_bit(
    reader: Reader, said: dict[str, str], whole: tuple[dict[str, Any], Any, Any]
) -> None:
    """By Ctrl-C, and without a master; to the same as the experiment."""
    first, second = (epochs_of(text) for command, text in said.items() if "step3-checkpoints.py" in command)
    assert [epoch["epoch"] for epoch in first + second] == list(range(LENGTH)) and len(first) >= 2 and second
    (run,) = [run for run in reader.reads("runs", "list") if "step3" in run["name"] and run["restarts"] == 1]
    reader.types("det-core", "checkpoint", "download", "latest", "bare", "--run", run["run_id"])
    assert_equal_bit_by_bit(loaded(reader.folder / "bare" / "data"), whole[0])


def test_a_new_trial_starts_with_the_weights_of_another(reader: Reader, said: dict[str, str]) -> None:
    source = reader.experiment("timm-step3")["trials"][0]["id"]
    options = ("--config", f"searcher.source_trial_id={source}", "--config", "name=continued")
    (trial,) = reader.sees_completed(reader.creates("step3-checkpoints.yaml", *options))["trials"]
    validations = reader.finds(trial["id"])
    assert [steps for steps, _ in validations] == [22 * epoch for epoch in range(1, LENGTH + 1)]
    assert validations[0][1]["val_top1"] > ACCURACY  # other than in a trial that starts from nothing


def test_step_4_as_a_grid(reader: Reader, said: dict[str, str]) -> None:
    trials = reader.experiment("timm-step4")["trials"]
    assert sorted(t["hparams"]["lr"] for t in trials) == pytest.approx([10**x for x in (-2, -1.5, -1)])
    for trial in trials:
        validations = reader.finds(trial["id"])
        assert trial["state"] == "COMPLETED" and len(validations) == LENGTH
        assert trial["best_metric"] == min(values["val_loss"] for _, values in validations)
        largest = max(values["lr"] for _, values in reader.finds(trial["id"], "training"))
        assert largest == pytest.approx(trial["hparams"]["lr"], rel=0.1)  # the schedule's maximum, but for the warm-up
    assert max(values["val_top1"] for t in trials for _, values in reader.finds(t["id"])) > ACCURACY
    (bare,) = (text for command, text in said.items() if "step4-hyperparameters.py" in command)
    epochs = epochs_of(bare)
    assert len(epochs) == LENGTH and 0.09 < max(epoch["lr"] for epoch in epochs) <= 0.1
