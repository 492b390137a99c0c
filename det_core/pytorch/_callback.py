"""Callbacks: what a user may hook into, and the hooks of one fit, each looked up once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from det_core import core

logger = logging.getLogger("det_core.pytorch")


class PyTorchCallback:
    """Hooks into training. Override some, and return instances by name from ``PyTorchTrial.build_callbacks()``.

    Every rank has its own and every hook runs on every rank, unless it says otherwise. A callback with a state gives
    it in :meth:`state_dict`; all ranks get the chief's back.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """First of all, before loaders are built.

        Args:
            first_batch_idx: how many batches were trained before.
            checkpoint_uuid: the checkpoint to start from.
        """

    def on_training_start(self) -> None:
        """When the checkpoint is restored, before the first batch or validation."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch; not for an epoch in whose middle a resume goes on."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch, before it is reported."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """After training metrics were reported; the same values on every rank.

        Args:
            avg_metrics: averages over ranks and batches, and the reducers' results.
            batch_metrics: one dictionary a batch, averaged over ranks.
        """

    def on_validation_start(self) -> None:
        """Before a validation; models are in evaluation mode."""

    def on_validation_epoch_start(self) -> None:
        """Before the first ``evaluate_batch``."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """After the last ``evaluate_batch``; ``outputs`` is what it returned on this rank."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """After a validation, before its metrics are reported."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is saved, on the chief. ``checkpoint`` is what is about to be, and may be added to."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Deprecated: :meth:`on_checkpoint_write_end`."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """When the files are in ``checkpoint_dir``, on the chief; files that are put there are kept with them."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """When the checkpoint ``uuid`` is complete."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Before what was saved is applied."""

    def on_trial_shutdown(self) -> None:
        """Last of all, also when an error leaves the training; in the opposite order of callbacks."""

    def state_dict(self) -> dict[str, Any]:
        """What to save of this callback: tensors, numbers, strings, lists and dictionaries. On the chief."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""


HOOKS = tuple(name for name in vars(PyTorchCallback) if name.startswith("on_"))


class Hooks:
    """The hooks of one fit: an attribute for each, a list of the methods of those callbacks that override it.

    Functions are compared, not names, so that a user's class may be called as ours.

    Attributes:
        named: the callbacks.
        anywhere: the hooks that a callback of any rank overrides, once :meth:`agree` was called.
    """

    on_training_epoch_start: list[Callable[[int], None]]
    on_training_epoch_end: list[Callable[[int], None]]
    on_checkpoint_end: list[Callable[[str], None]]
    on_checkpoint_write_end: list[Callable[[str], None]]

    def __init__(self, callbacks: Mapping[str, PyTorchCallback]) -> None:
        if not isinstance(callbacks, Mapping):
            raise TypeError(f"build_callbacks() returned a {type(callbacks).__name__}: expected a dict by name")
        for name, callback in callbacks.items():
            if not isinstance(callback, PyTorchCallback):
                raise TypeError(f"build_callbacks()[{name!r}] is a {type(callback).__name__}, no PyTorchCallback")
        self.named = dict(callbacks)
        self.anywhere: frozenset[str] = frozenset()
        self._started: list[PyTorchCallback] = []
        for hook in HOOKS:
            setattr(self, hook, [getattr(c, hook) for c in self.named.values() if _overrides(c, hook)])
        self.on_training_epoch_start = [_with_epoch(method) for method in self.on_training_epoch_start]

    def agree(self, distributed: core.DistributedContext) -> None:
        """Let all ranks know which hooks there are, since what a report gathers depends on that."""
        everybody = distributed.allgather([hook for hook in HOOKS if getattr(self, hook)])
        self.anywhere = frozenset(hook for hooks in everybody for hook in hooks)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of every callback that has it."""
        for method in getattr(self, hook):
            method(*args, **kwargs)

    def start_up(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Call ``on_trial_startup``; from then on :meth:`shut_down` counts."""
        for callback in self.named.values():
            self._started.append(callback)
            callback.on_trial_startup(first_batch_idx, checkpoint_uuid)

    def shut_down(self) -> None:
        """Call ``on_trial_shutdown`` of those that were started, the last one first."""
        with ExitStack() as stack:  # calls all of them, whatever one raises
            while self._started:
                stack.callback(self._started.pop(0).on_trial_shutdown)

    def is_stateful(self, name: str) -> bool:
        """Whether a callback takes a state back."""
        return _overrides(self.named[name], "load_state_dict")


def _overrides(callback: PyTorchCallback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(PyTorchCallback, method)


def _with_epoch(method: Callable[..., None]) -> Callable[[int], None]:
    """``on_training_epoch_start`` as it is called today; older ones have no parameter."""
    if inspect.signature(method).parameters:
        return method
    logger.warning("%s() has no parameter epoch_idx: add it", method.__qualname__)
    return lambda _epoch_idx: method()
