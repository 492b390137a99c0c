"""Learning rate schedulers, and the batches after which they step: a pure count."""

from __future__ import annotations

import enum
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from det_core.errors import InvalidExperimentException


class _StepMode(enum.Enum):
    """``LRScheduler.StepMode``: when a scheduler steps. Always right after a batch at which optimizers step."""

    STEP_EVERY_EPOCH = 1
    """After every ``frequency``-th epoch."""
    STEP_EVERY_BATCH = 2
    """After every ``frequency``-th batch; with aggregated gradients several times in one go."""
    MANUAL_STEP = 3
    """Never: ``train_batch`` steps it."""
    STEP_EVERY_OPTIMIZER_STEP = 4
    """After every ``frequency``-th step of the optimizers."""


class LRScheduler:
    """A scheduler of torch's with how often it steps. Made by ``context.wrap_lr_scheduler()``.

    Args:
        scheduler: the scheduler.
        step_mode: what ``frequency`` counts.
        frequency: step at every so many of them.

    Raises:
        TypeError: ``step_mode`` is no StepMode.
        InvalidExperimentException: a ReduceLROnPlateau in another mode than MANUAL_STEP, or a frequency below 1.
    """

    StepMode = _StepMode

    def __init__(self, scheduler: Any, step_mode: _StepMode, frequency: int = 1) -> None:
        if not isinstance(step_mode, _StepMode):
            raise TypeError(f"step_mode must be an LRScheduler.StepMode, not {step_mode!r}")
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise InvalidExperimentException(f"frequency={frequency!r}: expected a whole number of at least 1")
        if isinstance(scheduler, ReduceLROnPlateau) and step_mode is not _StepMode.MANUAL_STEP:
            raise InvalidExperimentException(
                "ReduceLROnPlateau needs a metric to step: use LRScheduler.StepMode.MANUAL_STEP, and call its step()"
            )
        self._scheduler, self._mode, self._frequency = scheduler, step_mode, frequency

    def steps_after(self, batch_idx: int, aggregation: int, epoch_len: int | None) -> int:
        """How often to step after a batch at which optimizers step.

        Args:
            batch_idx: the batch, from 0.
            aggregation: optimizers step at every so many batches.
            epoch_len: batches in an epoch; None: it never ends.
        """
        mode = self._mode
        if mode is _StepMode.STEP_EVERY_BATCH:
            done, before = batch_idx + 1, batch_idx + 1 - aggregation
        elif mode is _StepMode.STEP_EVERY_OPTIMIZER_STEP:
            done = (batch_idx + 1) // aggregation
            before = done - 1
        elif mode is _StepMode.STEP_EVERY_EPOCH and epoch_len:
            # the epochs that the next update will have left behind, so that the last update of an epoch counts
            done, before = (batch_idx + aggregation) // epoch_len, batch_idx // epoch_len
        else:
            return 0
        return max(done, 0) // self._frequency - max(before, 0) // self._frequency

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler."""
        self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The last learning rates, one for each group of parameters."""
        last: list[float] = self._scheduler.get_last_lr()
        return last

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the scheduler to a state."""
        self._scheduler.load_state_dict(state)
