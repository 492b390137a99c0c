"""A script that trains for some tenths of a second: operations, metrics and checkpoints, and nothing but det_core."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from det_core import core, get_cluster_info

PACE = float(os.environ.get("CHAOS_PACE", "0.01"))
"""Seconds that a step takes."""
SAVE_EVERY = 3


def loss(lr: float, step: int) -> float:
    """Return the metric of a step."""
    return abs(lr - 0.3) + 1.0 / (1 + step)


class Training:
    """Progress of the training, and its reports."""

    def __init__(self, ctx: core.Context, lr: float) -> None:
        self.ctx, self.lr = ctx, lr
        self.step = self.lines = 0
        if ctx.latest_checkpoint is not None:
            with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
                self.step = json.loads((Path(path) / "state.json").read_text())["step"]

    def train(self, length: int) -> float:
        """Train until so many steps are done in all; returns the loss."""
        while self.step < length:
            time.sleep(PACE)
            self.step += 1
            self.ctx.train.report_training_metrics(self.step, {"loss": loss(self.lr, self.step)})
            self.say(f"step {self.step}")
            if self.ctx.preempt.should_preempt():
                self.save()
                raise SystemExit
            if self.step % SAVE_EVERY == 0:
                self.save()
        self.ctx.train.report_validation_metrics(self.step, {"loss": loss(self.lr, self.step)})
        self.save()
        return loss(self.lr, self.step)

    def save(self) -> None:
        """Save a checkpoint."""
        with self.ctx.checkpoint.store_path({"steps_completed": self.step}) as (path, _):
            (path / "state.json").write_text(json.dumps({"step": self.step}))

    def say(self, text: str) -> None:
        """Write a numbered line, in one piece."""
        os.write(1, f"line {self.lines}: {text}\n".encode())
        self.lines += 1


def main() -> None:
    """Train whatever the search asks for."""
    info = get_cluster_info()
    assert info is not None and info.trial is not None
    with open(os.environ["CHAOS_TOKENS"], "a") as file:
        file.write(f"{info.session_token}\n")
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        training = Training(ctx, info.trial.hparams["lr"])
        for op in ctx.searcher.operations():
            op.report_completed(training.train(op.length))


if __name__ == "__main__":
    main()
