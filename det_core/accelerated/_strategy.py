"""How a Trainer's model lies over processes and devices: by Hugging Face's accelerate; the only module that knows it.

accelerate prepares the model and the optimizers once a run. In a step it is asked only for what a plain call does not
do: its wrappers cost about 165 of 440 µs for a tiny model (an import probe in each ``optimizer.step()``,
``inspect.signature`` in each ``zero_grad()``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_core._env import Environment
from det_core._optional import require
from det_core._training.process_group import local_device, make_group
from det_core._training.strategy import DDP, _Parallel, load_model, load_optimizer
from det_core.errors import CheckpointError

NEEDED = {"extra": "accelerate", "purpose": "the accelerated Trainer"}
OURS = "made_by_det_core"
"""Marks accelerate's shared settings as those of an accelerator that was made here."""


def make_accelerator(mixed_precision: str | None) -> Any:
    """An ``accelerate.Accelerator``, as its launcher and environment say.

    Raises:
        MissingExtra: accelerate is not installed.
        ValueError: this machine has more ranks than GPUs.
    """
    accelerate = require("accelerate", **NEEDED)
    # unless told that there is no device, accelerate takes each rank of a machine without one for a job of its own
    several = int(Environment.read().launch.get("WORLD_SIZE", 1)) > 1
    if several:
        make_group()  # accelerate would leave its end to the script
    cpu = several and not getattr(torch, "accelerator", torch.cuda).is_available()
    # all accelerators of a process share their settings: the precision of one Trainer would be the next one's; those of
    # an accelerator that the user has made stay
    shared = accelerate.state.AcceleratorState
    if shared._shared_state.get(OURS):
        shared._reset_state()
    ours = not shared._shared_state
    accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    if several and accelerator.device.type == "cuda":
        local_device(accelerator.local_process_index)  # accelerate puts the ranks without a GPU on another one's
    if ours and is_plain(str(accelerator.distributed_type.value)):
        shared._shared_state[OURS] = True
    return accelerator


def is_plain(distributed_type: str) -> bool:
    """Whether a model is whole on every process, so that torch's own calls do."""
    return distributed_type == "NO" or distributed_type.startswith("MULTI_")


class Strategy:
    """Around an ``accelerate.Accelerator``, or a test's stand-in for one that has some of its names.

    Args:
        accelerator: the accelerator.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.num_processes: int = accelerator.num_processes
        self.is_main_process: bool = accelerator.is_main_process
        self.is_local_main_process: bool = accelerator.is_local_main_process
        index = getattr(accelerator, "process_index", None)  # a stand-in may have none, or a stand-in for one
        self.process_index = index if isinstance(index, int) else int(not self.is_main_process)
        self.device = torch.device(accelerator.device)
        kind = accelerator.distributed_type
        self.distributed_type = str(getattr(kind, "value", kind))
        self.mixed_precision = str(accelerator.mixed_precision)
        self.optimizer_step_was_skipped = False
        self.is_real = hasattr(accelerator, "backward")
        self.is_whole = not self.is_real or is_plain(self.distributed_type)
        self.scaler = getattr(accelerator, "scaler", None)
        # a user's accelerator that accumulates by itself says in its wrappers when an update is due
        accumulates = self.is_real and getattr(accelerator, "gradient_accumulation_steps", 1) != 1
        self._direct = self.is_whole and self.scaler is None and not accumulates
        self._wrapper: Any = require("accelerate", **NEEDED).optimizer.AcceleratedOptimizer if self.is_real else ()
        self._late: dict[int, Any] = {}
        self._has_wrapped = False

    # before and after a run

    def prepare(self, model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        """The model on its device, spread over the ranks; and what to call in place of the optimizers."""
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            warnings.warn(
                "mixed_precision='fp16' needs a GPU: on this CPU the model computes in float32; 'bf16' works on both",
                UserWarning, stacklevel=2,
            )  # fmt: skip
        ready = [o for o in optimizers if isinstance(o, Optimizer) or not self.is_real]
        prepared = self.accelerator.prepare(model, *ready)
        new, wrapped = (prepared[0], list(prepared[1:])) if ready else (prepared, [])
        self._has_wrapped = new is not model
        if type(new) is nn.parallel.DistributedDataParallel:
            new.__class__ = _Parallel  # through which overrides find attributes of the user's model
        by_id = dict(zip(map(id, ready), wrapped, strict=True))
        return new, [by_id.get(id(one), one) for one in optimizers]

    def free(self) -> None:
        """Let accelerate forget what it has prepared; its garbage collection, 0.12 s, only where that frees something:
        memory of a device, or a wrapper and its buckets."""
        if self.is_real and self.is_whole and self.device.type == "cpu" and not self._has_wrapped:
            for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
                setattr(self.accelerator, name, [])
        else:
            self.accelerator.free_memory()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model as the user has built it, but for ``torch.compile``."""
        if self.is_whole:
            return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        inner: nn.Module = self.accelerator.unwrap_model(model)
        return inner

    def unwrap_optimizer(self, optimizer: Any) -> Any:
        """The optimizer as the user has built it: without accelerate's wrapper, and with one of the user's own."""
        return optimizer.optimizer if isinstance(optimizer, self._wrapper) else optimizer

    def release(self, model: nn.Module) -> None:
        """Undo what :meth:`prepare` did to the model itself."""
        if self.is_real and self.mixed_precision != "no" and hasattr(model, "_original_forward"):
            model.__dict__.pop("forward", None)
            model.__dict__.pop("_original_forward", None)

    def bare(self, model: nn.Module) -> nn.Module:
        """The model without any wrapper, ``torch.compile``'s neither."""
        model = self.unwrap_model(model)
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model

    # a step

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over the ranks outside of :meth:`no_sync`."""
        loss.backward() if self._direct else self.accelerator.backward(loss)

    def check_averaged(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Before a first update: raise a RuntimeError on every rank if it is not the same on all."""
        if self.num_processes > 1 and self.is_whole and getattr(self.accelerator, "sync_gradients", True):
            plain = [self.unwrap_optimizer(optimizer) for optimizer in optimizers]
            DDP(self.device).check_averaged([model], [o for o in plain if isinstance(o, Optimizer)])

    def step(self, optimizers: Iterable[Any]) -> None:
        """Step the optimizers; :attr:`optimizer_step_was_skipped` says whether fp16's gradients were not finite."""
        if self._direct:
            for optimizer in optimizers:
                if isinstance(optimizer, self._wrapper):
                    optimizer.optimizer.step()
                    optimizer._opt_called = True  # torch's schedulers warn unless what they were given has stepped
                else:
                    optimizer.step()
            return
        for optimizer in optimizers:
            self._prepared(optimizer).step()
        self.optimizer_step_was_skipped = bool(self.accelerator.optimizer_step_was_skipped)

    def zero_grad(self, optimizers: Iterable[Any]) -> None:
        """Set all gradients to None."""
        for optimizer in optimizers:
            (self.unwrap_optimizer(optimizer) if self._direct else self._prepared(optimizer)).zero_grad()

    def _prepared(self, optimizer: Any) -> Any:
        """An optimizer that was made in the run, as the scaler needs it."""
        if isinstance(optimizer, self._wrapper) or not isinstance(optimizer, Optimizer) or not self.is_whole:
            return optimizer
        if id(optimizer) not in self._late:
            self._late[id(optimizer)] = self.accelerator.prepare(optimizer)
        return self._late[id(optimizer)]

    def clip_value(self, model: nn.Module, limit: float) -> None:
        """Clip each gradient to [-limit, limit]."""
        (nn.utils if self._direct else self.accelerator).clip_grad_value_(model.parameters(), limit)

    def clip_norm(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradients down to a common norm of at most ``limit``; returns the norm they had."""
        clip = (nn.utils if self._direct else self.accelerator).clip_grad_norm_
        return torch.as_tensor(clip(model.parameters(), limit))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, gradients stay this rank's own."""
        return self.accelerator.no_sync(model)  # type: ignore[no-any-return]

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts, ranks may call the model different numbers of times."""
        several = self.num_processes > 1 and self.is_whole
        return DDP(self.device).evaluating([model]) if several else nullcontext()

    # between ranks

    def gather(self, data: Any) -> Any:
        """Nested tensors of all ranks, concatenated along their first dimension, on every rank."""
        return self.accelerator.gather(data) if self.num_processes > 1 else data

    def gather_objects(self, mine: Any) -> list[Any]:
        """What each rank has given, on every rank."""
        everyone = [mine] * self.num_processes
        if self.num_processes > 1:
            torch.distributed.all_gather_object(everyone, mine)
        return everyone

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

    # states

    def state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The states of the model, the optimizers and the gradient scaler, the same on every rank."""
        self._check_whole()
        scaler = None if self.scaler is None else self.scaler.state_dict()
        plain = [self.unwrap_optimizer(optimizer).state_dict() for optimizer in optimizers]
        return {"model": self.bare(model).state_dict(), "optimizers": plain, "scaler": scaler}

    def load(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Put them to what :meth:`state` returned."""
        self._check_whole()
        load_model(self.bare(model), state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            load_optimizer(self.unwrap_optimizer(optimizer), saved)
        if self.scaler is not None and state.get("scaler") is not None:
            self.scaler.load_state_dict(state["scaler"])

    def _check_whole(self) -> None:
        if not self.is_whole:
            raise CheckpointError(
                f"checkpoints need the whole model on every process, and accelerate distributes it as "
                f"{self.distributed_type}: set checkpoint_every=None and use save_training_state()"
            )


def nested(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Lists, tuples and dictionaries of tensors, with what a function makes of each tensor in its place."""
    if isinstance(data, Mapping):
        return type(data)({key: nested(function, value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, list | tuple):
        items = [nested(function, value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return function(data)
