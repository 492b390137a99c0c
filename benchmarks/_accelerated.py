"""Blocks of the accelerated Trainer's loop and of the bare loop in turn, in the same processes:
``_accelerated.py BLOCK PAIRS STEP_MS``.

Run by ``accelerated_loop`` as a script, alone or behind the launcher; prints what ``_trial.py`` prints, and the ratio
of CPU times beside.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._trial import BATCH, BLOCK, PAIRS, STEP_MS, Bare, data, loss_of, mlp
from det_core.accelerated import Trainer

RECORDS = 32_000
"""An epoch of 500 batches in one process."""


class Measured(Trainer):
    """Runs a block of each bare loop after each of its own blocks."""

    bare: list[Bare]
    began: tuple[float, float] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.done = 0
        self.ours: list[tuple[float, float]] = []
        self.others: list[list[tuple[float, float]]] = []

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()
        self.done += 1
        if self.done % BLOCK == 0:
            self.block()

    def block(self) -> None:
        """A block of ours is over."""
        now = clocks()
        if self.began is not None:
            self.ours.append(since(self.began, now))
        took = []
        for bare in self.bare if len(self.ours) % 2 else self.bare[::-1]:
            began = clocks()
            bare.run(BLOCK)
            took.append(since(began, clocks()))
        if self.began is not None:
            self.others.append(took if len(self.ours) % 2 else took[::-1])
        self.began = clocks()


class Slow(Measured):
    """A step of 20 ms."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        time.sleep(STEP_MS / 1e3)
        return super().calculate_train_batch_loss(batch)


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float], now: tuple[float, float]) -> tuple[float, float]:
    return now[0] - began[0], now[1] - began[1]


def main() -> None:
    """Train, and print."""
    from det_core import core

    assert loss_of is not None
    distributed = core.DistributedContext.detect()
    managed = core.init(distributed=distributed) if STEP_MS else nullcontext()
    if not STEP_MS:
        distributed.close()
    with managed:
        model = mlp()
        trainer = (Slow if STEP_MS else Measured)(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01))
        strategy = trainer._det_core.strategy
        trainer.bare = [Bare(strategy.process_index, strategy.num_processes) for _ in range(2)]
        dataset = data(RECORDS)
        per_epoch = RECORDS // BATCH // strategy.num_processes
        options: dict[str, Any] = {"report_every": 50, "checkpoint_every": 200} if STEP_MS else {}
        trainer.train(
            dataset, num_epochs=-(-BLOCK * (PAIRS + 3) // per_epoch), per_device_batch_size=BATCH,
            train_dataloader_kwargs={"num_workers": 0}, **options,
        )  # fmt: skip
    if strategy.is_main_process:
        ours, others = trainer.ours[1:], trainer.others[1:]  # the first block warms up
        print(
            "RESULT "
            + json.dumps({
                "ratios": [bare[0][0] / mine[0] for mine, bare in zip(ours, others, strict=True)],
                "cpu": [bare[0][1] / mine[1] for mine, bare in zip(ours, others, strict=True)],
                "again": [bare[1][0] / bare[0][0] for bare in others],
                "micros": sorted(bare[0][0] for bare in others)[len(others) // 2] / BLOCK * 1e6,
            }),
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
