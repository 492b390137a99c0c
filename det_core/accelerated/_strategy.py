"""Distribution of a Trainer's model over processes and devices, the only module that uses Hugging Face's accelerate.

accelerate prepares the model and the optimizers once per run. Steps call it only where plain calls do not suffice: its
wrappers cost about 165 of 440 µs for a tiny model (an import probe in each ``optimizer.step()``,
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
"""Key that marks accelerate's shared settings as those of an accelerator made here."""


def make_accelerator(mixed_precision: str | None) -> Any:
    """Return an ``accelerate.Accelerator`` for the launcher and the environment.

    Raises:
        MissingExtra: If accelerate is not installed.
        ValueError: If this node has more ranks than GPUs.
    """
    accelerate = require("accelerate", **NEEDED)
    # without cpu=True, accelerate treats each rank of a machine without a device as a separate job
    several = int(Environment.read().launch.get("WORLD_SIZE", 1)) > 1
    if several:
        make_group()  # accelerate would leave its destruction to the script
    cpu = several and not getattr(torch, "accelerator", torch.cuda).is_available()
    # All accelerators of a process share their settings, so the next Trainer would get the precision of this one; those
    # of an accelerator made by the user stay.
    shared = accelerate.state.AcceleratorState
    if shared._shared_state.get(OURS):
        shared._reset_state()
    ours = not shared._shared_state
    accelerator = accelerate.Accelerator(mixed_precision=mixed_precision, cpu=cpu)
    if several and accelerator.device.type == "cuda":
        local_device(accelerator.local_process_index)  # accelerate puts ranks without a GPU on that of another rank
    if ours and is_plain(str(accelerator.distributed_type.value)):
        shared._shared_state[OURS] = True
    return accelerator


def is_plain(distributed_type: str) -> bool:
    """Return whether every process has the whole model, so that torch's own calls suffice."""
    return distributed_type == "NO" or distributed_type.startswith("MULTI_")


class Strategy:
    """Operations on an ``accelerate.Accelerator``, or on a test's stand-in with some of its attributes."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.num_processes: int = accelerator.num_processes
        self.is_main_process: bool = accelerator.is_main_process
        self.is_local_main_process: bool = accelerator.is_local_main_process
        self.process_index = int(not self.is_main_process)
        index = getattr(accelerator, "process_index", None)  # of a stand-in, missing or a mock
        if isinstance(index, int):
            self.process_index = index
        self.device = torch.device(accelerator.device)
        kind = accelerator.distributed_type
        self.distributed_type = str(getattr(kind, "value", kind))
        self.mixed_precision = str(accelerator.mixed_precision)
        self.optimizer_step_was_skipped = False
        self.is_real = hasattr(accelerator, "backward")
        self.is_whole = not self.is_real or is_plain(self.distributed_type)
        self.scaler = getattr(accelerator, "scaler", None)
        # the wrappers of a user's accelerator that accumulates decide when an update is due
        accumulates = self.is_real and getattr(accelerator, "gradient_accumulation_steps", 1) != 1
        self._direct = self.is_whole and self.scaler is None and not accumulates
        self._clipping: Any = accelerator
        if self._direct:
            self._clipping = nn.utils
        self._wrapper: Any = ()
        if self.is_real:
            self._wrapper = require("accelerate", **NEEDED).optimizer.AcceleratedOptimizer
        self._late: dict[int, Any] = {}
        self._has_wrapped = False

    # Before and after a run.

    def prepare(self, model: nn.Module, optimizers: list[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
        """Return the distributed model on its device, and the optimizers, wrapped if accelerate requires it."""
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            warnings.warn(
                "mixed_precision='fp16' needs a GPU: on this CPU the model computes in float32; 'bf16' works on both",
                UserWarning, stacklevel=2,
            )  # fmt: skip
        ready = [o for o in optimizers if isinstance(o, Optimizer) or not self.is_real]
        prepared = self.accelerator.prepare(model, *ready)
        new = prepared
        wrapped: list[Optimizer] = []
        if ready:  # without them it returns the model itself, not a tuple
            new, *wrapped = prepared
        self._has_wrapped = new is not model
        if type(new) is nn.parallel.DistributedDataParallel:
            new.__class__ = _Parallel  # overrides find attributes of the user's model through it
        by_id = dict(zip(map(id, ready), wrapped, strict=True))
        return new, [by_id.get(id(optimizer), optimizer) for optimizer in optimizers]

    def free(self) -> None:
        """Release the prepared objects of accelerate."""
        # Its garbage collection takes 0.12 s, so it is left out if there is neither device memory nor a wrapper with
        # buckets to free.
        if self.is_real and self.is_whole and self.device.type == "cpu" and not self._has_wrapped:
            for name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):
                setattr(self.accelerator, name, [])
        else:
            self.accelerator.free_memory()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model without its distributed wrapper; it stays compiled."""
        if self.is_whole:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                return model.module
            return model
        inner: nn.Module = self.accelerator.unwrap_model(model)
        return inner

    def unwrap_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer without accelerate's wrapper; user-defined ones stay."""
        if isinstance(optimizer, self._wrapper):
            return optimizer.optimizer
        return optimizer

    def release(self, model: nn.Module) -> None:
        """Undo the changes of :meth:`prepare` to the model itself."""
        if self.is_real and self.mixed_precision != "no" and hasattr(model, "_original_forward"):
            model.__dict__.pop("forward", None)
            model.__dict__.pop("_original_forward", None)

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the model without any wrapper, including that of ``torch.compile``."""
        model = self.unwrap_model(model)
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.Module):
            return inner
        return model

    # A step.

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over the ranks outside of :meth:`no_sync`."""
        if self._direct:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    def check_averaged(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Raise RuntimeError on every rank if their gradients differ before the first update."""
        if self.num_processes > 1 and self.is_whole and getattr(self.accelerator, "sync_gradients", True):
            plain = [self.unwrap_optimizer(optimizer) for optimizer in optimizers]
            DDP(self.device).check_averaged([model], [o for o in plain if isinstance(o, Optimizer)])

    def step(self, optimizers: Iterable[Any]) -> None:
        """Step the optimizers; set :attr:`optimizer_step_was_skipped` if fp16 gradients were not finite."""
        if self._direct:
            for optimizer in optimizers:
                if isinstance(optimizer, self._wrapper):
                    optimizer.optimizer.step()
                    optimizer._opt_called = True  # otherwise torch's schedulers warn that it has not stepped
                else:
                    optimizer.step()
            return
        for optimizer in optimizers:
            self._prepared(optimizer).step()
        self.optimizer_step_was_skipped = bool(self.accelerator.optimizer_step_was_skipped)

    def zero_grad(self, optimizers: Iterable[Any]) -> None:
        """Set all gradients to None."""
        for optimizer in optimizers:
            if self._direct:
                self.unwrap_optimizer(optimizer).zero_grad()
            else:
                self._prepared(optimizer).zero_grad()

    def _prepared(self, optimizer: Any) -> Any:
        """Return an optimizer in the form that the scaler needs, also if it was made during the run."""
        if isinstance(optimizer, self._wrapper) or not isinstance(optimizer, Optimizer) or not self.is_whole:
            return optimizer
        if id(optimizer) not in self._late:
            self._late[id(optimizer)] = self.accelerator.prepare(optimizer)
        return self._late[id(optimizer)]

    def clip_value(self, model: nn.Module, limit: float) -> None:
        """Clip each gradient to [-limit, limit]."""
        self._clipping.clip_grad_value_(model.parameters(), limit)

    def clip_norm(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradients down to a common norm of at most ``limit``; return their previous norm."""
        return torch.as_tensor(self._clipping.clip_grad_norm_(model.parameters(), limit))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Keep gradients of this rank apart while the context is open."""
        return self.accelerator.no_sync(model)  # type: ignore[no-any-return]

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Allow different numbers of model calls on the ranks while the context is open."""
        if self.num_processes > 1 and self.is_whole:
            return DDP(self.device).evaluating([model])
        return nullcontext()

    # Collectives.

    def gather(self, data: Any) -> Any:
        """Return nested tensors of all ranks, concatenated along their first dimension, on every rank."""
        if self.num_processes > 1:
            return self.accelerator.gather(data)
        return data

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, on every rank."""
        everyone = [mine] * self.num_processes
        if self.num_processes > 1:
            torch.distributed.all_gather_object(everyone, mine)
        return everyone

    def sums(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """Return the sum over all ranks of each number, as a float64 tensor."""
        mine = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=self.device) for n in numbers])
        if self.num_processes > 1:
            torch.distributed.all_reduce(mine)
        return mine

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called it."""
        if self.num_processes > 1:
            torch.distributed.barrier()

    # States.

    def state(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the states of the model, the optimizers and the gradient scaler, equal on every rank."""
        self._check_whole()
        scaler = None
        if self.scaler is not None:
            scaler = self.scaler.state_dict()
        plain = [self.unwrap_optimizer(optimizer).state_dict() for optimizer in optimizers]
        return {"model": self.bare(model).state_dict(), "optimizers": plain, "scaler": scaler}

    def load(self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state` into the model, the optimizers and the gradient scaler."""
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
    """Apply a function to each tensor in nested lists, tuples and dictionaries; return the same structure."""
    if isinstance(data, Mapping):
        return type(data)({key: nested(function, value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, list | tuple):
        items = [nested(function, value) for value in data]
        if hasattr(data, "_fields"):  # a named tuple takes its items one by one
            return type(data)(*items)
        return type(data)(items)
    return function(data)
