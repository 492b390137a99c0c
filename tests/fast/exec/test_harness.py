"""A trial class as a program: what a configuration means, a person's mistakes, and the whole way, bare and searched."""

from __future__ import annotations

import os
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.exec.harness import UsageError, bare_plan, found_class, main, period, plan_of
from support import warm

FILE = """
name: x
entrypoint: model_def:Digits
searcher: {name: single, metric: error, max_length: {epochs: 3}}
hyperparameters:
  lr: 0.1
  deep: {hidden: {type: int, minval: 1, maxval: 4}, fixed: 7}
min_validation_period: {epochs: 1}
min_checkpoint_period: {records: 100}
scheduling_unit: 5
checkpoint_policy: all
optimizations: {aggregation_frequency: 2, average_aggregated_gradients: false}
"""


def test_what_a_file_and_options_mean() -> None:
    plan = bare_plan(FILE, ["deep.hidden=3", "global_batch_size=50", "mode=fast", "lr=0.5"], None)
    assert plan.hparams == {
        "lr": 0.5, "deep": {"hidden": 3, "fixed": 7}, "global_batch_size": 50, "mode": "fast",
    }  # fmt: skip
    assert plan.init == {"aggregation_frequency": 2, "searcher_metric": "error", "smaller_is_better": True}
    assert plan.init.keys() - {"aggregation_frequency"} <= signature(core.init).parameters.keys()
    assert plan.gradients == (False, False)
    assert plan.fit == {
        "checkpoint_period": ("Batch", 2), "validation_period": ("Epoch", 1), "reporting_period": ("Batch", 5),
        "checkpoint_policy": "all", "step_zero_validation": False, "profiling_enabled": False,
        "max_length": ("Epoch", 3),
    }  # fmt: skip
    assert plan.config is not None and plan.config["searcher"]["metric"] == "error"


@pytest.mark.parametrize(
    ("text", "value"), [(".2", 0.2), ("1e-3", 1e-3), ("7", 7), ("wide", "wide"), ("[1, a]", [1, "a"]), ("a: b", "a: b")]
)
def test_hyperparameters_are_read_as_in_a_file(text: str, value: Any) -> None:
    """``.2`` was a text, and dropout failed on it."""
    assert bare_plan(None, [f"dropout={text}"], "3").hparams == {"dropout": value}


def test_a_range_needs_a_value_when_bare() -> None:
    text = FILE.replace("lr: 0.1", "lr: {type: log, base: 10, minval: -2, maxval: 0}")
    with pytest.raises(UsageError, match=r"searches over lr, deep.hidden: .*--hparam lr=… --hparam deep.hidden=…"):
        bare_plan(text, ["global_batch_size=1"], None)


@pytest.mark.parametrize(
    ("text", "given", "length", "message"),
    [
        (None, [], None, "length missing"),
        (None, ["lr"], "3", "--hparam lr: expected NAME=VALUE"),
        (None, [], "years=3", "--max-length years=3: expected"),
        (None, [], "epochs=0", "--max-length epochs=0"),
    ],
)
def test_mistakes_in_options(text: str | None, given: list[str], length: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bare_plan(text, given, length)


def test_lengths_and_periods() -> None:
    assert bare_plan(None, ["a=1"], "7").fit == {"max_length": ("Batch", 7)}
    assert bare_plan(None, [], "epochs=2").fit == {"max_length": ("Epoch", 2)}
    assert period({"batches": 0}, "p", {}) is None and period(None, "p", {}) is None
    assert period({"records": 7}, "p", {"global_batch_size": 10}) == ("Batch", 1)
    with pytest.raises(ValueError, match="exactly one of batches, epochs and records"):
        period({"batches": 1, "epochs": 1}, "p", {})
    with pytest.raises(ValueError, match="requires the hyperparameter global_batch_size"):
        period({"records": 1}, "p", {})
    assert plan_of({}, {}).fit["reporting_period"] == ("Batch", 100)


MODEL = """
import sys
import torch
from det_core import pytorch


class Digits(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(1)
        self.model = context.wrap_model(torch.nn.Linear(2, 1))
        lr = context.get_hparam("lr")
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=lr))

    def loader(self):
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)

    build_training_data_loader = build_validation_data_loader = loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def evaluate_batch(self, batch):
        return {"error": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}


class NoTrial:
    pass
"""


def run(folder: Path, *words: str, status: int = 0, **env: str) -> str:
    done = warm.run(["-m", "det_core.exec.harness", *words], cwd=folder, env={**os.environ, **env})
    assert done.returncode == status, done.stdout
    return done.stdout


def test_a_person_makes_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "broken.yaml").write_text("searcher: {name: single}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for spec, message in (
        ("nowhere:Digits", "no module nowhere in"), ("model_def:Other", "has no class Other"),
        ("model_def:NoTrial", "a subclass of det_core.pytorch.PyTorchTrial"), ("model_def", "expected MODULE:CLASS"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            found_class(spec)
    sys.modules.pop("model_def")
    assert main(["model_def:Digits", "--config", "nothing.yaml"]) == 2
    said = run(tmp_path, "model_def:Digits", "--config", "broken.yaml", status=2)
    assert said.startswith("error: broken.yaml: searcher.metric: missing")
    said = run(tmp_path, "model_def:Digits", "--max-length", "3", status=1)
    assert "error: model_def.py:12: unknown hyperparameter 'lr'" in said and "Traceback" not in said
    (tmp_path / "records.yaml").write_text(FILE.replace("{hidden: {type: int, minval: 1, maxval: 4}, fixed: 7}", "1"))
    assert main(["model_def:Digits", "--config", "records.yaml"]) == 2
    assert "min_checkpoint_period in records requires the hyperparameter" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--config experiment.yaml" in capsys.readouterr().out


def test_bare_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model_def.py").write_text(MODEL)
    run(tmp_path, "model_def:Digits", "--max-length", "epochs=1", "--hparam", "lr=0.1")
    said = run(tmp_path, "model_def:Digits", "--max-length", "epochs=2", "--hparam", "lr=0.1", DET_CORE_RESUME="latest")
    assert "started again (restart 1)" in said and "resumed from checkpoint" in said and "completed" in said
