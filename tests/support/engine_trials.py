"""Tiny trials of DeepSpeed engines, for scripts in the venv of the frameworks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import deepspeed as ds
import torch

from det_core import pytorch
from det_core.pytorch import Batch, deepspeed
from support.trials import Numbers, Recording

ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


def say(**what: Any) -> None:
    """Tell the test."""
    print("SAID " + json.dumps(what), flush=True)


class Tiny(deepspeed.DeepSpeedTrial):
    """A small network, micro batches of two of the numbers, in order.

    Attributes:
        calls: the ``batch_idx`` of each call of ``train_batch``.
        seen: the records of each micro batch.
    """

    zero, accumulation, records, validation_records, micro = 0, 1, 16, 8, 2
    optimizer: dict[str, Any] = ADAM
    shuffle = False
    dropout = 0.0

    def __init__(self, context: deepspeed.DeepSpeedTrialContext) -> None:
        self.context = context
        self.calls: list[int] = []
        self.seen: list[list[float]] = []
        self.events: list[Any] = []
        torch.manual_seed(3)
        self.engine = context.wrap_model_engine(self.build())

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": self.optimizer,
            "zero_optimization": {"stage": self.zero},
            "steps_per_print": 10**9,
        }

    def layers(self) -> list[torch.nn.Module]:
        return [torch.nn.Linear(1, 8), torch.nn.Dropout(self.dropout), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)]

    def build(self) -> Any:
        model = torch.nn.Sequential(*self.layers())
        return ds.initialize(model=model, model_parameters=model.parameters(), config=self.config())[0]

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbers(self.records), self.micro, shuffle=self.shuffle)

    def build_validation_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbers(self.validation_records), self.micro)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"recording": Recording(self.events)}

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = self.context.to_device(batch)
        return ((self.engine(inputs / self.records) - labels / self.records) ** 2).mean()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        batch = next(dataloader_iter)
        self.calls.append(batch_idx)
        self.seen.append(batch[0].flatten().tolist())
        loss = self.loss(batch)
        self.engine.backward(loss)
        self.engine.step()
        return self.metrics(loss)

    def metrics(self, loss: torch.Tensor) -> Any:
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": self.loss(next(dataloader_iter))}


class Pipelined(Tiny):
    """The same in two stages."""

    stages = 2

    def build(self) -> Any:
        from deepspeed.pipe import PipelineModule

        net = PipelineModule(
            layers=self.layers(),
            num_stages=self.stages,
            loss_fn=torch.nn.functional.mse_loss,
            partition_method="uniform",
        )
        parameters = [p for p in net.parameters() if p.requires_grad]
        return ds.initialize(model=net, model_parameters=parameters, config=self.config())[0]

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.calls.append(batch_idx)
        return self.metrics(self.engine.train_batch(data_iter=dataloader_iter))

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"error": self.engine.eval_batch(dataloader_iter, compute_loss=True)}


def digest_of(engine: Any) -> str:
    """Return a digest of an engine's weights and optimizer, as this rank holds them, and of torch's generator.

    With ZeRO 3 it is of the whole weights alone: a rank's part of them ends in padding, whose content is anything.
    """
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            found.update(repr((value.dtype, value.shape)).encode() + value.detach().float().numpy().tobytes())
        elif value is None or isinstance(value, bool | int | float | str):
            found.update(repr(value).encode())

    weights = list(engine.module.parameters())
    with ds.zero.GatheredParameters(weights, enabled=engine.zero_optimization_stage() == 3):
        add([engine.global_steps, weights, torch.get_rng_state()])
    if engine.zero_optimization_stage() < 3:
        add(engine.optimizer.state_dict())
    return found.hexdigest()


def fit(cls: Any, length: int, init: dict[str, Any] | None = None, **options: Any) -> Any:
    """Build and fit a trial; returns it."""
    with deepspeed.init(**{"hparams": {}, **(init or {})}) as context:
        trial = cls(context)
        deepspeed.Trainer(trial, context).fit(max_length=Batch(length), **options)
    return trial
