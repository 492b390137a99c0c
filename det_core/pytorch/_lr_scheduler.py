"""Learning rate schedulers, and the batches after which they step."""

from __future__ import annotations

import enum
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from det_core.errors import InvalidExperimentException


class _StepMode(enum.Enum):
    """Unit of a scheduler's steps, as ``LRScheduler.StepMode``. It steps right after batches with an optimizer step."""

    STEP_EVERY_EPOCH = 1
    """After every ``frequency``-th epoch."""
    STEP_EVERY_BATCH = 2
    """After every ``frequency``-th batch; with aggregated gradients, several times in a row."""
    MANUAL_STEP = 3
    """Only in ``train_batch``."""
    STEP_EVERY_OPTIMIZER_STEP = 4
    """After every ``frequency``-th step of the optimizers."""


class LRScheduler:
    """A torch scheduler with its step mode, made by ``context.wrap_lr_scheduler()``.

    Args:
        scheduler: the scheduler.
        step_mode: unit of ``frequency``.
        frequency: number of units between two steps.

    Raises:
        TypeError: If ``step_mode`` is not a StepMode.
        InvalidExperimentException: For a ReduceLROnPlateau in another mode than MANUAL_STEP, or a frequency below 1.
    """

    StepMode = _StepMode

    def __init__(self, scheduler: Any, step_mode: _StepMode, frequency: int = 1) -> None:
        if not isinstance(step_mode, _StepMode):
            raise TypeError(f"step_mode must be an LRScheduler.StepMode, not {step_mode!r}")
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise InvalidExperimentException(f"frequency={frequency!r}: expected an integer of at least 1")
        if isinstance(scheduler, ReduceLROnPlateau) and step_mode is not _StepMode.MANUAL_STEP:
            raise InvalidExperimentException(
                "ReduceLROnPlateau needs a metric to step: use LRScheduler.StepMode.MANUAL_STEP, and call its step()"
            )
        self._scheduler = scheduler
        self._mode = step_mode
        self._frequency = frequency

    def steps_after(self, batch_idx: int, aggregation: int, epoch_len: int | None) -> int:
        """Return the number of steps to make after a batch with an optimizer step.

        Args:
            batch_idx: index of the batch, from 0.
            aggregation: number of batches between two optimizer steps.
            epoch_len: batches in an epoch; None if it never ends.
        """
        mode = self._mode
        if mode is _StepMode.STEP_EVERY_BATCH:
            done = batch_idx + 1
            before = batch_idx + 1 - aggregation
        elif mode is _StepMode.STEP_EVERY_OPTIMIZER_STEP:
            done = (batch_idx + 1) // aggregation
            before = done - 1
        elif mode is _StepMode.STEP_EVERY_EPOCH and epoch_len:
            # Counted up to the next update, so that the last update of an epoch counts for it.
            done = (batch_idx + aggregation) // epoch_len
            before = batch_idx // epoch_len
        else:
            return 0
        return max(done, 0) // self._frequency - max(before, 0) // self._frequency

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler."""
        self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the last learning rates, one for each parameter group."""
        last: list[float] = self._scheduler.get_last_lr()
        return last

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of the scheduler."""
        self._scheduler.load_state_dict(state)
