"""Cosine decay from the base rate to a floor, after a linear warmup, with a cooldown at the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from det_core.accelerated._placeholders import Placeholder, TrainerPlaceholderValues
from det_core.accelerated.schedulers.scheduler_base import StatefulSchedulerBase


class CosineLrScheduler(StatefulSchedulerBase):
    """Cosine decay (Loshchilov and Hutter, "SGDR", 2017, without restarts).

    With U updates in an epoch, the run has T = ``total_num_epochs`` · U of them, the first W and the last C of which
    are warmup and cooldown. The rate of a group with base rate b after n updates is, with the floor m and the start s:

    - n < W: s + n (b - s) / W
    - W ≤ n < T - C: m + (b - m) (1 + cos(π (n - W)^k / (T - W - C)^k)) / 2
    - n ≥ T - C: m

    Args:
        optimizer: the optimizer.
        total_num_epochs: epochs of the run, warmup and cooldown included.
        num_update_steps_per_epoch: updates in an epoch, as this process makes them.
        k_decay: exponent k; above 1 the rate stays high longer (Zhang and Li, "k-decay", 2020).
        lr_min: the floor.
        min_lr_ratio: the floor as a fraction of each group's base rate; replaces ``lr_min``.
        num_warmup_epochs: epochs of warmup.
        warmup_starting_lr: rate at the start of the warmup.
        warmup_starting_lr_ratio: the same as a fraction of each group's base rate; replaces ``warmup_starting_lr``.
        num_cooldown_epochs: epochs at the floor, at the end.

    Raises:
        AssertionError: If epochs or updates are not positive, or ``lr_min`` is negative.
    """

    _SAVED = (
        "total_iterations", "lr_min_ratio", "lr_min", "warmup_iterations", "warmup_lr_init", "warmup_lr_ratio",
        "k_decay", "num_cooldown_iterations",
    )  # fmt: skip

    def __init__(
        self, optimizer: Any, total_num_epochs: int, num_update_steps_per_epoch: int, k_decay: float = 1.0,
        lr_min: float = 1e-6, min_lr_ratio: float | None = None, num_warmup_epochs: int = 0,
        warmup_starting_lr: float = 1e-6, warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        if not (total_num_epochs > 0 and num_update_steps_per_epoch > 0):
            raise AssertionError(
                f"total_num_epochs and num_update_steps_per_epoch must be above 0, not {total_num_epochs} and "
                f"{num_update_steps_per_epoch}"
            )
        if not lr_min >= 0:
            raise AssertionError(f"lr_min must be at least 0, not {lr_min}")
        self.total_iterations = total_num_epochs * num_update_steps_per_epoch
        self.lr_min_ratio = min_lr_ratio
        self.lr_min = lr_min
        self.warmup_iterations = num_warmup_epochs * num_update_steps_per_epoch
        self.warmup_lr_init = warmup_starting_lr
        self.warmup_lr_ratio = warmup_starting_lr_ratio
        self.k_decay = k_decay
        self.num_cooldown_iterations = num_cooldown_epochs * num_update_steps_per_epoch
        if self.warmup_iterations > 0:
            self.step_update(0)

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the rate of each group after a number of updates."""
        return [self._rate(base, num_updates) for base in self.base_lr_values]

    def _rate(self, base: float, n: int) -> float:
        floor = self.lr_min
        if self.lr_min_ratio is not None:
            floor = self.lr_min_ratio * base
        start = self.warmup_lr_init
        if self.warmup_lr_ratio is not None:
            start = self.warmup_lr_ratio * base
        warmup = self.warmup_iterations
        end = self.total_iterations - self.num_cooldown_iterations
        if n < warmup:
            return start + n * (base - start) / warmup
        if n >= end:
            return floor
        part = (n - warmup) ** self.k_decay / (end - warmup) ** self.k_decay
        return floor + 0.5 * (base - floor) * (1 + math.cos(math.pi * part))

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the number of updates."""
        return {**{name: getattr(self, name) for name in self._SAVED}, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a schedule and its number of updates.

        Raises:
            KeyError: If the state is that of another scheduler.
        """
        found = {name: state_dict[name] for name in self._SAVED}
        self._num_updates = state_dict["num_updates"]
        vars(self).update(found)

    @classmethod
    def create_scheduler_fn(
        cls, total_num_epochs: int | Placeholder = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: int | Placeholder = TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        k_decay: float = 1.0, lr_min: float = 1e-6, min_lr_ratio: float | None = None, num_warmup_epochs: int = 0,
        warmup_starting_lr: float = 1e-6, warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: int = 0,
    ) -> Callable[[Any], CosineLrScheduler]:  # fmt: skip
        """Return a function for ``train(create_scheduler_fn=)``; by default, the schedule spans the whole run."""
        arguments = {name: value for name, value in locals().items() if name != "cls"}
        return partial(cls, **arguments)  # the trainer replaces placeholders by numbers
