"""How a Trainer's model lies over processes and devices without accelerate: one device, or DDP under a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_core._env import Environment
from det_core._training.precision import autocast_forward
from det_core._training.process_group import local_device, make_group
from det_core._training.strategy import DDP, OneProcess, load_model, load_optimizer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Strategy:
    """What a Trainer asks of the way its model is spread; offers the names of an ``accelerate.Accelerator`` that
    scripts use (``device``, ``is_main_process``, ``gather()``, ``no_sync()``, …).

    Where the environment says that there are several ranks, a process group is made unless there is one.

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what the model's forward pass computes in.

    Raises:
        ValueError: another ``mixed_precision``, or fp16 without a GPU.
    """

    def __init__(self, mixed_precision: str = "no") -> None:
        if mixed_precision not in ("no", *DTYPES):
            raise ValueError(f"mixed_precision={mixed_precision!r}: expected one of no, bf16, fp16")
        launch = Environment.read().launch
        several = int(launch.get("WORLD_SIZE", 1)) > 1 and "RANK" in launch
        if several:
            make_group()
        ranks = torch.distributed if several else None
        self.num_processes: int = ranks.get_world_size() if ranks else 1
        self.process_index: int = ranks.get_rank() if ranks else 0
        self.local_process_index = int(launch.get("LOCAL_RANK", 0)) if several else 0
        self.device = local_device(self.local_process_index)
        self.mixed_precision = mixed_precision
        self.distributed_type = "NO" if not several else f"MULTI_{'GPU' if self.device.type == 'cuda' else 'CPU'}"
        self.optimizer_step_was_skipped = False
        self._models: OneProcess = DDP(self.device) if several else OneProcess(self.device)
        if mixed_precision == "fp16" and self.device.type != "cuda":
            raise ValueError("mixed_precision='fp16' needs a GPU; on a CPU use 'bf16'")
        self._scaler = torch.amp.GradScaler(self.device.type) if mixed_precision == "fp16" else None

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all ranks."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    # before and after a run

    def prepare(self, model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        """The model on its device, spread over the ranks; and what to call in place of the optimizers."""
        if self.mixed_precision != "no":
            autocast_forward(model, self.device.type, DTYPES[self.mixed_precision])
        return self._models.wrap(model), optimizers

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model as the user has built it, but for ``torch.compile``."""
        return self._models.unwrap(model)

    def unwrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as the user has built it."""
        return optimizer

    def release(self, model: nn.Module) -> None:
        """Undo what :meth:`prepare` did to the model itself."""
        model.__dict__.pop("forward", None) if self.mixed_precision != "no" else None

    def free_memory(self, *_: Any) -> None:
        """Forget prepared objects; none are kept here."""

    # a step

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over the ranks outside of :meth:`no_sync`."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Step the optimizers; :attr:`optimizer_step_was_skipped` says whether fp16's gradients were not finite."""
        if self._scaler is None:
            for optimizer in optimizers:
                optimizer.step()
            return
        stepped = [self._models.step(optimizer, self._scaler) for optimizer in optimizers]
        self._scaler.update()
        self.optimizer_step_was_skipped = not all(stepped)

    def zero_grad(self, optimizers: Sequence[Optimizer]) -> None:
        """Set all gradients to None."""
        for optimizer in optimizers:
            optimizer.zero_grad()

    def clip_value(self, model: nn.Module, optimizers: Sequence[Optimizer], limit: float) -> None:
        """Clip each gradient to [-limit, limit]."""
        self._unscale(optimizers)
        nn.utils.clip_grad_value_(model.parameters(), limit)

    def clip_norm(self, model: nn.Module, optimizers: Sequence[Optimizer], limit: float) -> Tensor:
        """Scale the gradients down to a common norm of at most ``limit``; returns the norm they had."""
        self._unscale(optimizers)
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    def _unscale(self, optimizers: Sequence[Optimizer]) -> None:
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.unscale_(optimizer)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, gradients stay this rank's own."""
        return self._models.no_sync([model])

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, ranks may call the model different numbers of times."""
        return self._models.evaluating([model])

    # between ranks

    def gather(self, data: Any) -> Any:
        """Nested tensors of all ranks, concatenated along their first dimension, on every rank."""
        return data if self.num_processes == 1 else nested(self._gather, data)

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous() if tensor.ndim else tensor.reshape(1)
        everyone = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        torch.distributed.all_gather(everyone, tensor)
        return torch.cat(everyone)

    def sums(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """The sum over all ranks of each number, as a float64 tensor."""
        mine = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=self.device) for n in numbers])
        if self.num_processes > 1:
            torch.distributed.all_reduce(mine)
        return mine

    def wait_for_everyone(self) -> None:
        """Return once every rank has called it."""
        if self.num_processes > 1:
            torch.distributed.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print()`` on the first rank of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    # states

    def state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The states of the model, the optimizers and the gradient scaler, the same on every rank."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        plain = [self.unwrap_optimizer(optimizer).state_dict() for optimizer in optimizers]
        return {"model": self.bare(model).state_dict(), "optimizers": plain, "scaler": scaler}

    def load(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Put them to what :meth:`state` returned, here or under another strategy."""
        load_model(self.bare(model), state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            load_optimizer(self.unwrap_optimizer(optimizer), saved)
        if self._scaler is not None and state.get("scaler") is not None:
            self._scaler.load_state_dict(state["scaler"])

    def bare(self, model: nn.Module) -> nn.Module:
        """The model without any wrapper, ``torch.compile``'s neither."""
        model = self.unwrap_model(model)
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model


def nested(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Lists, tuples and dictionaries of tensors, with what a function makes of each tensor in its place."""
    if isinstance(data, Mapping):
        return type(data)({key: nested(function, value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, list | tuple):
        items = [nested(function, value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return function(data)
