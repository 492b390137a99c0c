"""Warmup, stable rate and short decay: a training can continue from before a decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from det_core.accelerated._placeholders import Placeholder, TrainerPlaceholderValues
from det_core.accelerated.schedulers.scheduler_base import StatefulSchedulerBase


class WSDLrScheduler(StatefulSchedulerBase):
    """Warmup-stable-decay (Hu et al., "MiniCPM", 2024), with a decay for each of several checkpoints in one run.

    The T updates of the run are divided into periods that end at the checkpoint steps (see
    :func:`estimate_checkpoint_steps`). The rate of a group with base rate b after n updates:

    - n < ``num_warmup_steps``: linear from ``warmup_starting_lr`` to b.
    - stable: b.
    - in the last d = int(L · ``decay_phase_ratio``) steps of a period of length L, with r from 0 at the first of them
      to 1 at the end of the period: b (m + (1 - m)(1 - √r)), or b / (r / m + 1 - r), where m is ``lr_min``.
    - the next period starts at b; after the last one the rate stays at its value for r = 1.

    Args:
        optimizer: the optimizer.
        num_epochs: epochs of the run.
        num_update_steps_per_epoch: updates in an epoch, as this process makes them.
        total_steps: T, instead of the two arguments before.
        num_warmup_steps: updates of warmup; None means T / 100.
        decay_phase_ratio: fraction of a period that is decay, from 0 to 1.
        lr_min: end of a decay, as a fraction of the base rate.
        warmup_starting_lr: rate at the start of the warmup.
        use_inverse_sqrt_decay: use the first of the two forms of decay, otherwise the second.
        num_checkpoints: number of periods.
        is_continuation_from_checkpoint: the run continues a checkpoint, without warmup. Loading a state then takes
            only ``decay_phase_ratio`` from it, and restarts the count.

    Attributes:
        checkpoint_steps: updates at which periods end.
        checkpoint_decay_info: see :meth:`get_decay_info`.
        previous_checkpoint_step: None; for scripts that read it.

    Raises:
        ValueError: If T is given twice or not at all, ``warmup_starting_lr`` is above the largest base rate, or decays
            take more than a third with several checkpoints.
        AssertionError: If an argument is out of range.
    """

    def __init__(
        self, optimizer: Any, num_epochs: int | None = None, num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None, num_warmup_steps: int | None = 0, decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6, warmup_starting_lr: float = 1e-6, use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1, is_continuation_from_checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        self.total_steps = _total(num_epochs, num_update_steps_per_epoch, total_steps)
        if num_warmup_steps is None:
            num_warmup_steps = int(0.01 * self.total_steps)
        self.num_warmup_steps = num_warmup_steps
        self.decay_phase_ratio = decay_phase_ratio
        self.lr_min = lr_min
        self.warmup_starting_lr = warmup_starting_lr
        self.use_inverse_sqrt_decay = use_inverse_sqrt_decay
        self.num_checkpoints = num_checkpoints
        self.is_continuation_from_checkpoint = is_continuation_from_checkpoint
        self.previous_checkpoint_step: int | None = None
        if not lr_min >= 0:
            raise AssertionError(f"lr_min must be at least 0, not {lr_min}")
        if not num_checkpoints > 0:
            raise AssertionError(f"num_checkpoints must be above 0, not {num_checkpoints}")
        if warmup_starting_lr > max(self.base_lr_values):
            raise ValueError(
                f"warmup_starting_lr={warmup_starting_lr} is above the optimizer's largest rate, "
                f"{max(self.base_lr_values)}"
            )
        self._set_periods()

    def _set_periods(self) -> None:
        """Divide the run into periods."""
        ratio = self.decay_phase_ratio
        if not 0 <= ratio <= 1:
            raise AssertionError(f"decay_phase_ratio must be from 0 to 1, not {ratio}")
        if self.num_checkpoints > 1 and ratio > 1 / 3:
            raise ValueError(f"decay_phase_ratio={ratio}: with several checkpoints it must be at most 1/3")
        self.checkpoint_steps = estimate_checkpoint_steps(self.total_steps, self.num_checkpoints)
        self.checkpoint_decay_info = []
        for start, end in zip([0, *self.checkpoint_steps], self.checkpoint_steps, strict=False):
            decay = int((end - start) * ratio)
            self.checkpoint_decay_info.append(
                {"period_start": start, "period_end": end, "decay_steps": decay, "pre_decay_step": end - decay}
            )

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the rate of each group after a number of updates."""
        if not self.is_continuation_from_checkpoint and num_updates < self.num_warmup_steps:
            part = num_updates / self.num_warmup_steps
            start = self.warmup_starting_lr
            return [start + part * (base - start) for base in self.base_lr_values]
        length, step = self._get_checkpoint_info(num_updates)
        decay = int(length * self.decay_phase_ratio)
        r = 0.0
        if decay:
            r = min((step - (length - decay)) / decay, 1.0)
        return [base * self._decayed(r) for base in self.base_lr_values]

    def _decayed(self, r: float) -> float:
        """Return the fraction of the base rate at a point of the decay."""
        if r <= 0:
            return 1.0
        if self.use_inverse_sqrt_decay:
            return self.lr_min + (1 - self.lr_min) * (1 - r**0.5)  # type: ignore[no-any-return]
        return self.lr_min / (r + (1 - r) * self.lr_min)  # 1 / (r / lr_min + 1 - r), which lr_min=0 would break

    def _get_checkpoint_info(self, num_updates: int) -> tuple[int, int]:
        """Return the length of the period of an update, and the number of its steps before."""
        info = next((i for i in self.checkpoint_decay_info if num_updates < i["period_end"]), None)
        info = info or self.checkpoint_decay_info[-1]
        return info["period_end"] - info["period_start"], num_updates - info["period_start"]

    # For scripts that clear the cache of pytorch-accelerated's method.
    _get_checkpoint_info.cache_clear = lambda: None  # type: ignore[attr-defined]

    def get_checkpoint_steps(self) -> list[int]:
        """Return the updates at which periods end."""
        return list(self.checkpoint_steps)

    def get_decay_info(self) -> list[dict[str, int]]:
        """Return ``period_start``, ``period_end``, ``decay_steps`` and ``pre_decay_step`` of each period.

        The decay of a period starts at its ``pre_decay_step``.
        """
        return [dict(info) for info in self.checkpoint_decay_info]

    def get_phase_info(self, step: int) -> dict[str, int]:
        """Return the period of a number of updates, as in :meth:`get_decay_info`."""
        info = next((i for i in self.checkpoint_decay_info if step <= i["period_end"]), None)
        return dict(info or self.checkpoint_decay_info[-1])

    def get_current_step(self) -> int:
        """Return the number of updates whose value is set: one less than were made, so -1 at first."""
        return self._num_updates

    def get_current_phase_info(self) -> dict[str, int]:
        """:meth:`get_phase_info` of :meth:`get_current_step`."""
        return self.get_phase_info(self._num_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the public attributes except the optimizer, and the number of updates."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "optimizer"}
        return {**public, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a schedule; in a continuation, start a new one with the saved ``decay_phase_ratio``.

        Attributes missing in the state are kept.
        """
        if not self.is_continuation_from_checkpoint:
            self._restore(state_dict)
            return
        self.decay_phase_ratio = state_dict.get("decay_phase_ratio", self.decay_phase_ratio)
        self.previous_checkpoint_step = None
        self._num_updates = -1
        self._set_periods()

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this run, even if the run is a continuation."""
        known = {name: value for name, value in state_dict.items() if name in self.state_dict()}
        self._num_updates = known.pop("num_updates", self._num_updates)
        vars(self).update(known)

    @classmethod
    def create_scheduler_fn(
        cls, total_num_epochs: int | Placeholder = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: int | Placeholder = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        num_warmup_epochs: int | None = None, decay_phase_ratio: float = 0.1, lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6, use_inverse_sqrt_decay: bool = True, num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> Callable[[Any], WSDLrScheduler]:  # fmt: skip
        """Return a function for ``train(create_scheduler_fn=)``; by default, the schedule spans the whole run.

        ``num_warmup_epochs=None`` means a warmup of a hundredth of the run.
        """
        arguments: dict[str, Any] = {name: value for name, value in locals().items() if name != "cls"}
        arguments["num_epochs"] = arguments.pop("total_num_epochs")
        del arguments["num_warmup_epochs"]
        warmup: Any = None
        if num_warmup_epochs is not None:
            warmup = num_update_steps_per_epoch * num_warmup_epochs
        return partial(cls, num_warmup_steps=warmup, **arguments)  # the trainer replaces placeholders


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int) -> list[int]:
    """Return the updates at which periods end: each period ends at twice the update of the one before.

    Args:
        total_steps: number of updates of the run, at which the last period ends.
        num_checkpoints: number of periods; a run too short for so many halves has fewer.
    """
    steps = {total_steps >> (num_checkpoints - 1 - i) for i in range(num_checkpoints)}
    return sorted(steps - {0})


def _total(num_epochs: int | None, num_update_steps_per_epoch: int | None, total_steps: int | None) -> int:
    if total_steps is None:
        if num_epochs is None or num_update_steps_per_epoch is None:
            raise ValueError("pass total_steps, or num_epochs and num_update_steps_per_epoch")
        total_steps = num_epochs * num_update_steps_per_epoch
    elif num_epochs is not None and num_update_steps_per_epoch is not None:
        raise ValueError("pass total_steps, or num_epochs and num_update_steps_per_epoch, not all three")
    if not total_steps > 0:
        raise AssertionError(f"the run must have updates, not {total_steps}")
    return total_steps
