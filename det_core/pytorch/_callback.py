"""Callbacks of trials, and the hooks of one fit."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from det_core import core

logger = logging.getLogger("det_core.pytorch")


class PyTorchCallback:
    """Base class of callbacks. Return instances by name from ``PyTorchTrial.build_callbacks()``.

    Every rank has its own instances, and every hook runs on every rank unless its docstring says otherwise. A callback
    with a state returns it from :meth:`state_dict`; a resume gives the chief's state to all ranks.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run before anything else, and before loaders are built.

        Args:
            first_batch_idx: number of batches trained before.
            checkpoint_uuid: ID of the checkpoint to start from, or None.
        """

    def on_training_start(self) -> None:
        """Run after the checkpoint is restored, before the first batch or validation."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch; not if a resume begins within the epoch."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch, before the epoch is reported."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Run after training metrics are reported, with the same values on every rank.

        Args:
            avg_metrics: averages over ranks and batches, and results of reducers.
            batch_metrics: one dictionary for each batch, averaged over ranks.
        """

    def on_validation_start(self) -> None:
        """Run before a validation, with models in evaluation mode."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first ``evaluate_batch``."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last ``evaluate_batch``, with its return values on this rank."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation, before its metrics are reported."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run on the chief before a checkpoint is saved; you may add entries to ``checkpoint``."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Run as :meth:`on_checkpoint_write_end`, which replaces this deprecated hook."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run on the chief when the files are in ``checkpoint_dir``; added files become part of the checkpoint."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run when the checkpoint ``uuid`` is complete."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before the saved state is applied."""

    def on_trial_shutdown(self) -> None:
        """Run after everything else, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: tensors, numbers, strings, lists and dictionaries. Called on the chief."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""


HOOKS = tuple(name for name in vars(PyTorchCallback) if name.startswith("on_"))


class Hooks:
    """Hooks of one fit: for each hook an attribute with the overriding methods of the callbacks.

    Attributes:
        named: callbacks by name.
        anywhere: names of hooks that a callback of any rank overrides; empty before :meth:`agree`.
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
                raise TypeError(
                    f"build_callbacks()[{name!r}] is a {type(callback).__name__}: expected a PyTorchCallback"
                )
        self.named = dict(callbacks)
        self.anywhere: frozenset[str] = frozenset()
        self._started: list[PyTorchCallback] = []
        for hook in HOOKS:
            setattr(self, hook, [getattr(c, hook) for c in self.named.values() if _overrides(c, hook)])
        self.on_training_epoch_start = [_with_epoch(method) for method in self.on_training_epoch_start]

    def agree(self, distributed: core.DistributedContext) -> None:
        """Exchange the names of overridden hooks among all ranks."""
        # The hooks of any rank decide what a report gathers, and a collective needs the same call on every rank.
        everybody = distributed.allgather([hook for hook in HOOKS if getattr(self, hook)])
        self.anywhere = frozenset(hook for hooks in everybody for hook in hooks)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of every callback that overrides it."""
        for method in getattr(self, hook):
            method(*args, **kwargs)

    def start_up(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Call ``on_trial_startup`` of every callback."""
        for callback in self.named.values():
            self._started.append(callback)  # first: a callback that fails in its start is shut down too
            callback.on_trial_startup(first_batch_idx, checkpoint_uuid)

    def shut_down(self) -> None:
        """Call ``on_trial_shutdown`` of the started callbacks, in reverse order."""
        with ExitStack() as stack:  # an error of one does not keep the others from ending
            while self._started:
                stack.callback(self._started.pop(0).on_trial_shutdown)

    def is_stateful(self, name: str) -> bool:
        """Return whether a callback overrides ``load_state_dict``."""
        return _overrides(self.named[name], "load_state_dict")


def _overrides(callback: PyTorchCallback, method: str) -> bool:
    # Functions and not names: a user's class may be called PyTorchCallback too.
    return getattr(type(callback), method) is not getattr(PyTorchCallback, method)


def _with_epoch(method: Callable[..., None]) -> Callable[[int], None]:
    """Return ``on_training_epoch_start`` with its parameter, which trials of old releases leave out."""
    if inspect.signature(method).parameters:
        return method
    logger.warning("%s() lacks the parameter epoch_idx: add it", method.__qualname__)
    return lambda _epoch_idx: method()
