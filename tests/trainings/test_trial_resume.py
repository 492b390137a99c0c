"""A trial that is stopped or killed and started again ends as one that was never disturbed, to the last bit."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.killed import Restarted, digest, disturb, equal_but_for_stops

torch = pytest.importorskip("torch")

SCRIPT = (TESTS / "support" / "noisy_trial.py").read_text()
ENV = {"RECORDS": "96", "BATCH": "8", "WORKERS": "0", "EPOCHS": "8"}


def ends(script: Restarted) -> str:
    """Return a digest of weights, optimizers, schedulers and torch's generators at the end."""
    state = script.state("state_dict.pth")
    state["rng_state"] = state["rng_state"]["torch"]
    return digest(state)


def joined(rows: list[tuple[Any, Any, Any]]) -> list[Any]:
    """Return the metrics of every batch, in order, however they lie in rows."""
    return [batch for _, _, batches in rows for batch in batches]


def disturbed_equals_straight(
    tmp_path: Path, ranks: int, workers: int, signals: list[signal.Signals], rng: random.Random, **more: str
) -> None:
    env = {**ENV, "WORKERS": str(workers), **more}
    straight = Restarted(tmp_path / "straight", SCRIPT, ranks, env)
    straight.finish()
    other = disturb(lambda name: Restarted(tmp_path / name, SCRIPT, ranks, env), rng, signals, most=30)
    assert [step for step, *_ in straight.rows("validation")] == [12 * epoch for epoch in range(1, 9)]
    assert len(joined(straight.rows())) == 96
    assert joined(other.rows()) == joined(straight.rows())
    assert other.rows("validation") == straight.rows("validation")
    equal_but_for_stops(other.rows(), straight.rows(), signals.count(signal.SIGTERM))
    assert ends(other) == ends(straight)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0)])
def test_killed_and_stopped_by_a_signal(tmp_path: Path, ranks: int, workers: int) -> None:
    disturbed_equals_straight(tmp_path, ranks, workers, [signal.SIGKILL, signal.SIGTERM], random.Random(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_loader_of_the_trial_killed_and_stopped_equals_straight(tmp_path: Path, ranks: int) -> None:
    signals = [signal.SIGKILL, signal.SIGTERM]
    disturbed_equals_straight(tmp_path, ranks, 0, signals, random.Random(ranks), FOREIGN="1")


def test_case_28_two_ranks_go_on_as_one_and_back(tmp_path: Path) -> None:
    """The global batch divides the dataset: the same records in the same steps, weights but for rounding.

    Another global batch is logged, once.
    """
    env = {**ENV, "DROPOUT": "0", "NOISE": "0", "EPOCHS": "6"}
    straight, changed = (Restarted(tmp_path / name, SCRIPT, 2, env) for name in ("straight", "changed"))
    straight.finish()
    for ranks, epochs in ((2, "2"), (1, "4"), (2, "6")):
        changed.env["EPOCHS"] = epochs
        changed.finish(ranks)
    assert "it continues at record" not in changed.output

    def records(script: Restarted) -> list[float]:
        # two ranks report the mean of what each has drawn, one rank all of it
        return [batch["records"] for batch in joined(script.rows())]

    mine, theirs = records(changed), records(straight)
    assert [a / b for a, b in zip(mine, theirs, strict=True)] == [1.0] * 24 + [2.0] * 24 + [1.0] * 24
    for a, b in zip(
        changed.state("state_dict.pth")["models_state_dict"][0].values(),
        straight.state("state_dict.pth")["models_state_dict"][0].values(),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    told = json.loads(next(changed.home.glob("runs/*/checkpoints/*/trial_state.json")).read_text())
    assert set(told["position"]) == {"seed", "batches", "pass", "records", "global_batch_size", "size"}

    changed.env.update(EPOCHS="7", BATCH="16")
    changed.finish(1)
    assert changed.output.count("it continues at record") == 1
    assert "resuming on 1 rank(s) with 16 records a step a training of 2 rank(s) with 8" in changed.output
