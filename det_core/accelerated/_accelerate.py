"""The strategy by Hugging Face's accelerate, where it is installed; the only module that knows it.

accelerate prepares the model and the optimizers once a run. In a step it is asked only for what a plain call does not
do: its wrappers cost about 165 of 440 µs for a tiny model (an import probe in each ``optimizer.step()``,
``inspect.signature`` in each ``zero_grad()``).
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_core._env import Environment
from det_core._optional import is_installed, require
from det_core._training.process_group import destroy_group
from det_core._training.strategy import DDP, OneProcess
from det_core.accelerated._strategy import Strategy
from det_core.errors import CheckpointError

OURS = "made_by_det_core"
"""Marks accelerate's shared settings as those of an accelerator that was made here."""


def is_plain(distributed_type: str) -> bool:
    """Whether a model is whole on every process, so that torch's own calls do."""
    return distributed_type == "NO" or distributed_type.startswith("MULTI_")


def make_accelerator(mixed_precision: str | None) -> Any:
    """An ``accelerate.Accelerator``, as its launcher and environment say; None: accelerate is not installed."""
    if not is_installed("accelerate"):
        return None
    accelerate = require("accelerate", extra="accelerate", purpose="the accelerated Trainer")
    # unless told that there is no device, accelerate takes each rank of a machine without one for a job of its own
    several = int(Environment.read().launch.get("WORLD_SIZE", 1)) > 1
    cpu = several and not getattr(torch, "accelerator", torch.cuda).is_available()
    # all accelerators of a process share their settings: the precision of one Trainer would be the next one's; those of
    # an accelerator that the user has made stay
    shared = accelerate.state.AcceleratorState
    if shared._shared_state.get(OURS):
        shared._reset_state()
    ours = not shared._shared_state
    grouped = torch.distributed.is_initialized()
    accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    if torch.distributed.is_initialized() and not grouped:  # accelerate leaves its end to the script
        atexit.register(destroy_group)
    if ours and is_plain(str(accelerator.distributed_type.value)):
        shared._shared_state[OURS] = True
    return accelerator


class AccelerateStrategy(Strategy):
    """Around an accelerator, or a test's stand-in for one that has some of its names.

    Args:
        accelerator: the ``Accelerator``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.num_processes = accelerator.num_processes
        self.process_index = int(getattr(accelerator, "process_index", 0 if accelerator.is_main_process else 1))
        self.local_process_index = int(
            getattr(accelerator, "local_process_index", 0 if accelerator.is_local_main_process else 1)
        )
        self.device = torch.device(accelerator.device)
        kind = accelerator.distributed_type
        self.distributed_type = str(getattr(kind, "value", kind))
        self.mixed_precision = str(accelerator.mixed_precision)
        self.optimizer_step_was_skipped = False
        self._models = DDP(self.device) if self.num_processes > 1 else OneProcess(self.device)
        self._scaler = getattr(accelerator, "scaler", None)
        self._real = hasattr(accelerator, "backward")
        self._direct = not self._real or (is_plain(self.distributed_type) and self._scaler is None)
        self._inner: list[Optimizer] = []

    def prepare(self, model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        prepared = self._accelerator.prepare(model, *optimizers)
        model, wrapped = (prepared[0], list(prepared[1:])) if optimizers else (prepared, [])
        self._inner = [self.unwrap_optimizer(optimizer) for optimizer in wrapped]
        return model, wrapped

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        if not self._real or is_plain(self.distributed_type):
            return self._models.unwrap(model)
        inner: nn.Module = self._accelerator.unwrap_model(model)
        return inner

    def unwrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        inner = getattr(optimizer, "optimizer", optimizer)
        return inner if isinstance(inner, Optimizer) else optimizer

    def release(self, model: nn.Module) -> None:
        if self._real and self.mixed_precision != "no" and hasattr(model, "_original_forward"):
            model.__dict__.pop("forward", None)
            model.__dict__.pop("_original_forward", None)

    def free_memory(self, *objects: Any) -> None:
        self._accelerator.free_memory(*objects)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self._direct else self._accelerator.backward(loss)

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in self._inner if self._direct else optimizers:
            optimizer.step()
        if self._direct:
            for optimizer in optimizers:  # torch's schedulers warn unless the one that they were given has stepped
                optimizer._opt_called = True
        else:
            self.optimizer_step_was_skipped = bool(self._accelerator.optimizer_step_was_skipped)

    def zero_grad(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in self._inner if self._direct else optimizers:
            optimizer.zero_grad()

    def clip_value(self, model: nn.Module, optimizers: Sequence[Optimizer], limit: float) -> None:
        if self._direct:
            nn.utils.clip_grad_value_(model.parameters(), limit)
        else:
            self._accelerator.clip_grad_value_(model.parameters(), limit)

    def clip_norm(self, model: nn.Module, optimizers: Sequence[Optimizer], limit: float) -> Tensor:
        if self._direct:
            return nn.utils.clip_grad_norm_(model.parameters(), limit)
        return torch.as_tensor(self._accelerator.clip_grad_norm_(model.parameters(), limit))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._accelerator.no_sync(model)  # type: ignore[no-any-return]

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._models.evaluating([model]) if is_plain(self.distributed_type) else nullcontext()

    def gather(self, data: Any) -> Any:
        return super().gather(data) if self._real else self._accelerator.gather(data)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._accelerator.print(*args, **kwargs) if not self._real else super().print(*args, **kwargs)

    def state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        self._check_whole()
        return super().state(model, optimizers)

    def load(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        self._check_whole()
        super().load(model, optimizers, state)

    def _check_whole(self) -> None:
        if self._real and not is_plain(self.distributed_type):
            raise CheckpointError(
                f"checkpoints through the core need the whole model on every process, and accelerate distributes it as "
                f"{self.distributed_type}: set checkpoint_every=None and use save_training_state()"
            )
