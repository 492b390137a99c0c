"""Port of timm's training beside its README: other images, workers, timm's own resume, asha."""

from __future__ import annotations

import re
import signal
import struct
from pathlib import Path

import pytest

from support.timm_steps import (
    ACCURACY,
    LAUNCHER,
    LENGTH,
    STEPS,
    Reader,
    assert_equal_bit_by_bit,
    commands,
    epochs_of,
    loaded,
    reader,
    short,
)  # fmt: skip

__all__ = ["reader"]


@pytest.fixture(scope="module")
def said(reader: Reader) -> dict[str, str]:
    """Return the output of those commands of the README that ``tests/timm`` leaves out."""
    left = [command for command in commands() if command not in short()]
    return reader.follows_all(left)


def test_step_1_as_the_readme_tells_it(said: dict[str, str]) -> None:
    """Under the launcher, and as an experiment; without anything of det_core's in the script."""
    (text,) = (text for command, text in said.items() if "step1-distributed.py" in command)
    epochs = epochs_of(text)
    assert [epoch["epoch"] for epoch in epochs] == list(range(LENGTH)) and epochs[-1]["val_top1"] > ACCURACY
    for rank in range(2):
        assert re.search(rf"^\[rank={rank}\] Training in distributed mode .* Process {rank}, total 2", text, re.M)
    told = said[f"det-core experiment create {STEPS[1]}.yaml . --follow"]
    assert "COMPLETED, 1 trial in" in told and "no trial has reported the metric 'val_loss'" in told


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


def test_what_timm_has_saved_is_gone_on_from(reader: Reader) -> None:
    """Without det_core, and by timm's own option."""
    whole = reader.trains("python", "step0-run.py", "--epochs", "3", "--output", "first")
    (last,) = (reader.folder / "first").glob("*/last.pth.tar")
    assert loaded(last)["epoch"] == 2 and len(whole) == 3
    (epoch,) = reader.trains("python", "step0-run.py", "--epochs", "4", "--resume", str(last))
    assert epoch["epoch"] == 3 and epoch["val_loss"] < whole[-1]["val_loss"]


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


def test_step_4_by_adaptive_asha(reader: Reader, said: dict[str, str]) -> None:
    trials = reader.experiment("timm-step4-adaptive")["trials"]
    lengths = [len(reader.finds(trial["id"])) for trial in trials]
    assert len(lengths) == 6 and set(lengths) <= {2, 4, 8} and lengths.count(8) >= 1 and lengths.count(2) >= 1
    assert {trial["state"] for trial in trials} == {"COMPLETED"}
    for trial in trials:
        steps = [steps for steps, _ in reader.finds(trial["id"])]
        assert steps == [22 * epoch for epoch in range(1, len(steps) + 1)]  # each epoch once, over all starts
