"""Blocks of a DeepSpeedTrial's loop and of the bare DeepSpeed loop in turn: ``_engine_trial.py BLOCK PAIRS STEP_MS``.

Run by ``deepspeed_loop`` as a script behind the launcher; the work and what is printed are those of ``_trial.py``.
"""

from __future__ import annotations

from typing import Any

import deepspeed as ds
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks._trial import BATCH, BLOCK, PAIRS, REPORT, Bare, Turns, data, loss_of, mlp
from det_core import pytorch
from det_core.pytorch import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}


def engine() -> Any:
    """With ZeRO 1."""
    model = mlp()
    return ds.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


class BareEngine(Bare):
    """The loop without us, with the same work."""

    def __init__(self, rank: int, size: int) -> None:
        dataset = data()
        self.engine = engine()
        self.loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, size, rank))
        self.batches = iter(self.loader)
        self.steps = 0

    def step(self, batch: Any) -> Any:
        """Train on a batch; its loss."""
        model = self.engine
        loss = loss_of(model, [each.to(model.device) for each in batch])
        model.backward(loss)
        model.step()
        return loss


class Trial(deepspeed.DeepSpeedTrial, Turns):
    """The same as a trial; at the end of each block the bare loops run theirs."""

    def __init__(self, context: deepspeed.DeepSpeedTrialContext) -> None:
        self.context = context
        self.engine = context.wrap_model_engine(engine())
        ranks = context.distributed
        self.begin([BareEngine(ranks.rank, ranks.size) for _ in range(2)])

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(data(), batch_size=BATCH, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.zeros(2, 64), torch.zeros(2, dtype=torch.long)), batch_size=1)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = loss_of(self.engine, self.context.to_device(next(dataloader_iter)))
        self.engine.backward(loss)
        self.engine.step()
        if (batch_idx + 1) % BLOCK == 0:
            self.block()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.engine, self.context.to_device(next(dataloader_iter)))}


def main() -> None:
    """Train, and print."""
    with deepspeed.init(hparams={}) as context:
        trial = Trial(context)
        deepspeed.Trainer(trial, context).fit(
            max_length=pytorch.Batch(BLOCK * (PAIRS + 3)), reporting_period=pytorch.Batch(REPORT)
        )
        if context.distributed.rank == 0:
            trial.tell()


if __name__ == "__main__":
    main()
