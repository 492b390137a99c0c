"""A trial of DeepSpeed that is killed, stopped and started again, also with another number of ranks."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.frameworks import PYTHON, WARM, need, variables
from support.killed import Restarted, disturb, equal_but_for_stops

SCRIPT = """
import os
import time
import torch
from det_core.pytorch import Batch, deepspeed
from support.engine_trials import ADAM, Pipelined, Tiny, digest_of, say

KIND, LENGTH = os.environ["KIND"], int(os.environ["LENGTH"])


class Trial(Pipelined if KIND.startswith("pipe") else Tiny):
    zero = int(KIND[-1]) if KIND[-1].isdigit() else 0
    accumulation, records, shuffle = 2, 40, True
    dropout = float(os.environ.get("DROPOUT", "0.3"))
    optimizer = ADAM if "OPTIMIZER" not in os.environ else {"type": os.environ["OPTIMIZER"], "params": {"lr": 0.01}}

    def config(self):
        ranks = 1 if KIND.startswith("pipe") else self.context.distributed.size
        return {**super().config(), "train_micro_batch_size_per_gpu": 4 // ranks, "zero_allow_untested_optimizer": True}

    @property
    def micro(self):
        return 4 // (1 if KIND.startswith("pipe") else self.context.distributed.size)

    def metrics(self, loss):
        return {"loss": loss, "records": sum(self.seen[-1]) if self.seen else 0.0}

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        time.sleep(float(os.environ.get("PACE", "0")))
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


if __name__ == "__main__":
    torch.manual_seed(11)
    with deepspeed.init(name="engines", resume="latest", hparams={}, searcher_metric="error") as context:
        trial = Trial(context)
        deepspeed.Trainer(trial, context).fit(
            max_length=Batch(LENGTH), validation_period=Batch(6), checkpoint_period=Batch(5),
            reporting_period=Batch(3), checkpoint_policy="none",
        )
        say(rank=context.distributed.rank, batches=len(trial.calls), digest=digest_of(trial.engine))
"""
ENV = {"LENGTH": "18", "PYTHONPATH": str(TESTS)}


def script(folder: Path, kind: str, *, cold: bool = True, **env: str) -> Restarted:
    """Return a script on two ranks; cold ones are started by the launcher."""
    need()
    found = {**variables(), **ENV, "KIND": kind, **env}
    return Restarted(folder, SCRIPT, 2, found, PYTHON if cold else None, kind=WARM)


def ends(found: Restarted) -> dict[int, str]:
    """Return the digest of each rank's engine at the last end."""
    said = [json.loads(text) for text in re.findall(r"SAID (.*)$", found.output, re.MULTILINE)]
    return {each["rank"]: each["digest"] for each in said}


def joined(found: Restarted) -> list[Any]:
    return [batch for _, _, batches in found.rows() for batch in batches]


def killed_and_stopped_equals_straight(
    tmp_path: Path, kind: str, rng: random.Random, *, kills: int = 1, rounds: int = 1, cold: bool = True
) -> None:
    """Compare runs killed ``kills`` times and then stopped once with undisturbed ones."""
    length = 6 + 12 * kills
    straight = script(tmp_path / "straight", kind, cold=cold, LENGTH=str(length))
    straight.finish()
    rows = joined(straight)
    assert len(rows) == length * (1 if kind == "pipe" else 2) and len(ends(straight)) == 2
    for n in range(rounds):
        other = disturb(
            lambda name, n=n: script(tmp_path / f"{n}-{name}", kind, cold=cold, LENGTH=str(length), PACE="0.02"),
            rng, [*[signal.SIGKILL] * kills, signal.SIGTERM], most=9,
        )  # fmt: skip
        assert joined(other) == rows
        assert other.rows("validation") == straight.rows("validation")
        equal_but_for_stops(other.rows(), straight.rows(), 1)
        assert ends(other) == ends(straight)


def resumed_with_another_number_of_ranks(tmp_path: Path, kind: str, *, cold: bool = True) -> None:
    """Check that another number of ranks gives the losses of two ranks throughout, but for rounding."""
    straight, changed = (script(tmp_path / name, kind, cold=cold, DROPOUT="0") for name in ("straight", "changed"))
    straight.finish()
    for ranks, length in ((2, "5"), (1, "10"), (2, "18")):
        changed.env["LENGTH"] = length
        changed.finish(ranks)
    assert "the training goes on at record" not in changed.output

    def losses(found: Restarted) -> list[float]:
        return [batch["loss"] for batch in joined(found)]

    assert losses(changed) == pytest.approx(losses(straight), rel=1e-4)
