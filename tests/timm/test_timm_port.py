"""The port of timm's training in five steps: every step bare, under the launcher and as an experiment."""

from __future__ import annotations

import difflib
import itertools
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.timm_steps import (
    EXAMPLE,
    LAUNCHER,
    README,
    STEPS,
    Reader,
    assert_equal_bit_by_bit,
    commands,
    epochs_of,
    loaded,
    timm_or_skip,
)

PATIENCE = 900.0
LENGTH = 5
ACCURACY = 95.0
pytestmark = pytest.mark.timeout(3 * PATIENCE)
with_timm = pytest.mark.timm


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Somebody with a machine of two slots."""
    timm_or_skip()
    found = Reader(tmp_path_factory.mktemp("reader"))
    try:
        found.types("det-core", "master", "up", "--slots", "2")
        yield found
    finally:
        found.leaves()


@pytest.fixture(scope="module")
def said(reader: Reader) -> dict[str, str]:
    """What each command of the README says, run as they stand there, one after the other."""
    found = {}
    for command, interrupted in commands():
        if not interrupted:
            found[command] = reader.follows(command)
            continue
        watching = command.startswith("det-core")
        after = "Epoch 0:" if watching else "Epoch 1:"
        status, text = reader.interrupts("bash", "-c", f"exec {command}", after=after, by=signal.SIGINT)
        assert watching or status == 0, text
        found[f"{command} # Ctrl-C"] = text
    return found


@pytest.fixture(scope="module")
def whole(reader: Reader) -> tuple[dict[str, Any], Any, Any]:
    """Step 3 to its end, never paused: its last checkpoint, and the metrics of training and validation."""
    return result_of(reader, reader.sees_completed(reader.creates("step3-checkpoints.yaml")))


def result_of(reader: Reader, told: Any) -> tuple[dict[str, Any], Any, Any]:
    """What :func:`whole` has, of the trial of an experiment that has ended."""
    (trial,) = told["trials"]
    assert trial["restarts"] == 0 and trial["steps_completed"] == 22 * LENGTH
    found = reader.fetches(told["id"], "--trial", str(trial["id"]))
    return found, reader.finds(trial["id"], "training"), reader.finds(trial["id"])


def changed(before: str, after: str) -> list[str]:
    """The lines that differ between two files, indentation aside, as diff shows them."""
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


@with_timm
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


@with_timm
@pytest.mark.parametrize("step", STEPS)
def test_each_step_runs_bare(reader: Reader, step: str) -> None:
    done = reader.types("python", f"{step}.py", "--epochs", "1")
    (epoch,) = epochs_of(done.stderr)
    assert epoch["images_per_second"] > 0 and 0 < epoch["val_loss"] < 3
    assert "Training with a single process" in done.stderr
    runs = [run for run in reader.reads("runs", "list") if f"{step}.py" in run["name"]]
    assert len(runs) == (step >= STEPS[2])
    for run in runs:
        assert run["state"] == "completed"
        rows = reader.types("det-core", "runs", "export", run["run_id"], "--format", "csv").stdout
        assert "val_loss" in rows
        assert len(reader.reads("runs", "show", run["run_id"])["checkpoints"]) == (step >= STEPS[3])


def test_the_readme_has_commands_for_each_step() -> None:
    for step in STEPS:
        assert any(re.match(rf".*python.* {step}\.py", command) for command, _ in commands())
        assert any(command.startswith(f"det-core experiment create {step}.yaml .") for command, _ in commands())
    assert [command.split()[2] for command, interrupted in commands() if interrupted] == [
        "det_core.launch.torch_distributed",
        "logs",
    ]


@with_timm
def test_steps_0_and_1_as_the_readme_tells_them(said: dict[str, str]) -> None:
    """Without anything of det_core's in the script: bare or under the launcher, and as an experiment."""
    logs = [text for command, text in said.items() if re.search("step[01].*py|logs latest$", command)]
    for text, size in zip(logs, (1, 1, 2), strict=True):
        epochs = epochs_of(text)
        assert [epoch["epoch"] for epoch in epochs] == list(range(LENGTH)) and epochs[-1]["val_top1"] > ACCURACY
        for rank in range(2):
            line = rf"^\[rank={rank}\] Training in distributed mode .* Process {rank}, total 2"
            assert bool(re.search(line, text, re.M)) == (size == 2)
    for step in STEPS[:2]:
        told = said[f"det-core experiment create {step}.yaml . --follow"]
        assert "COMPLETED, 1 trial in" in told and "no trial has reported the metric 'val_loss'" in told


@with_timm
def test_what_timm_has_saved_is_gone_on_from(reader: Reader) -> None:
    """Without det_core, and by timm's own option."""
    whole = reader.trains("python", "step0-run.py", "--epochs", "3", "--output", "first")
    (last,) = (reader.folder / "first").glob("*/last.pth.tar")
    assert loaded(last)["epoch"] == 2 and len(whole) == 3
    (epoch,) = reader.trains("python", "step0-run.py", "--epochs", "4", "--resume", str(last))
    assert epoch["epoch"] == 3 and epoch["val_loss"] < whole[-1]["val_loss"]


@with_timm
@pytest.mark.parametrize("dataset", ["torch/image_folder", "torch/mnist"])
def test_other_images_that_timm_can_read(reader: Reader, tmp_path: Path, dataset: str) -> None:
    folder = Path(reader.types("python", "digits.py").stdout.strip())
    options = ["--data-dir", str(folder)]
    if dataset == "torch/mnist":
        as_mnist(folder, tmp_path)
        options = ["--data-dir", str(tmp_path), "--input-size", "1", "32", "32"]
    (epoch,) = reader.trains("python", "step0-run.py", "--epochs", "1", "--dataset", dataset, *options)
    assert epoch["loss"] < 2.2
    assert "--data-dir" in reader.types("python", "step0-run.py", "--dataset", dataset, status=2).stderr


def as_mnist(folder: Path, root: Path) -> None:
    """Write images in the files of MNIST: two with the numbers and sizes in front, and one byte for each."""
    import numpy as np
    from PIL import Image

    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, name in (("train", "train"), ("validation", "t10k")):
        paths = sorted((folder / split).glob("*/*.png"))
        pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
        labels = bytes(int(path.parent.name) for path in paths)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, *pixels.shape) + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels)


@with_timm
def test_step_2_has_metrics(reader: Reader, said: dict[str, str]) -> None:
    (trial,) = reader.experiment("timm-step2")["trials"]
    validations = reader.finds(trial["id"])
    assert [steps for steps, _ in validations] == [22 * epoch for epoch in range(1, LENGTH + 1)]
    assert validations[-1][1]["val_top1"] > ACCURACY
    assert [sorted(values) for _, values in reader.finds(trial["id"], "training")] == [["loss", "lr"]] * LENGTH
    assert trial["best_metric"] == min(values["val_loss"] for _, values in validations)
    assert trial["latest_checkpoint"] is None
    assert f"best trial: {trial['id']}, val_loss" in said["det-core experiment create step2-metrics.yaml . --follow"]
    assert said["det-core runs export latest --format csv"].count("validation") == LENGTH


@with_timm
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


@with_timm
def test_step_3_is_interrupted_bare_and_goes_on_to_the_last_bit(
    reader: Reader, said: dict[str, str], whole: tuple[dict[str, Any], Any, Any]
) -> None:
    """By Ctrl-C, and without a master; to the same as the experiment."""
    first, second = (epochs_of(text) for command, text in said.items() if "step3-checkpoints.py" in command)
    assert [epoch["epoch"] for epoch in first + second] == list(range(LENGTH)) and len(first) >= 2 and second
    (run,) = [run for run in reader.reads("runs", "list") if "step3" in run["name"] and run["restarts"] == 2]
    reader.types("det-core", "checkpoint", "download", "latest", "bare", "--run", run["run_id"])
    assert_equal_bit_by_bit(loaded(reader.folder / "bare" / "data"), whole[0])


@with_timm
def test_step_3_with_workers_goes_on_to_the_last_bit(reader: Reader, tmp_path: Path) -> None:
    """Processes that load images have random numbers of their own; and SIGTERM is as good as Ctrl-C."""
    words = (*LAUNCHER, "step3-checkpoints.py", "--workers", "2", "--epochs", "4", "--output")
    home = {"DET_CORE_HOME": str(tmp_path / "workers")}
    status, _ = reader.interrupts(*words, str(tmp_path / "first"), after="Epoch 1:", by=signal.SIGTERM, **home)
    assert status == 0
    epochs = reader.trains(*words, str(tmp_path / "second"), DET_CORE_RESUME="latest", **home)
    assert 2 <= epochs[0]["epoch"] <= 3
    reader.trains(*words, str(tmp_path / "whole"), **home)
    resumed, whole = (loaded(next((tmp_path / name).glob("*/last.pth.tar"))) for name in ("second", "whole"))
    assert_equal_bit_by_bit(resumed, whole)


@with_timm
def test_a_new_trial_starts_with_the_weights_of_another(reader: Reader, said: dict[str, str]) -> None:
    source = reader.experiment("timm-step3")["trials"][0]["id"]
    options = ("--config", f"searcher.source_trial_id={source}", "--config", "name=continued")
    (trial,) = reader.sees_completed(reader.creates("step3-checkpoints.yaml", *options))["trials"]
    validations = reader.finds(trial["id"])
    assert [steps for steps, _ in validations] == [22 * epoch for epoch in range(1, LENGTH + 1)]
    assert validations[0][1]["val_top1"] > ACCURACY  # other than in a trial that starts from nothing


@with_timm
def test_step_4_as_a_grid(reader: Reader, said: dict[str, str]) -> None:
    trials = reader.experiment("timm-step4")["trials"]
    assert sorted(t["hparams"]["lr"] for t in trials) == pytest.approx([10**x for x in (-2, -1.75, -1.5, -1.25, -1)])
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


@with_timm
def test_step_4_by_adaptive_asha(reader: Reader, said: dict[str, str]) -> None:
    trials = reader.experiment("timm-step4-adaptive")["trials"]
    lengths = [len(reader.finds(trial["id"])) for trial in trials]
    assert len(lengths) == 6 and set(lengths) <= {2, 4, 8} and lengths.count(8) >= 1 and lengths.count(2) >= 1
    assert {trial["state"] for trial in trials} == {"COMPLETED"}
    for trial in trials:
        steps = [steps for steps, _ in reader.finds(trial["id"])]
        assert steps == [22 * epoch for epoch in range(1, len(steps) + 1)]  # each epoch once, over all starts
