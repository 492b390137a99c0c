"""Warmup, a stable rate, and a short decay: schedules that can be gone on with from before their decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from det_core.accelerated._placeholders import Placeholder, TrainerPlaceholderValues
from det_core.accelerated.schedulers.scheduler_base import StatefulSchedulerBase


class WSDLrScheduler(StatefulSchedulerBase):
    """Warmup-stable-decay (Hu et al., "MiniCPM", 2024), with the decay of several checkpoints in one run.

    The run's T updates are parted into periods that end at the checkpoint steps (see
    :func:`estimate_checkpoint_steps`). The rate of a group with base rate b after n updates:

    - n < ``num_warmup_steps``: linear from ``warmup_starting_lr`` to b.
    - stable: b.
    - in the last d = int(L · ``decay_phase_ratio``) steps of a period of length L, with r going from 0 at their first
      to 1 at the period's end: b (m + (1 - m)(1 - √r)), or b / (r / m + 1 - r), where m is ``lr_min``.
    - the next period starts at b again; after the last one the rate stays where r = 1 has brought it.

    Args:
        optimizer: the optimizer.
        num_epochs: epochs of the run.
        num_update_steps_per_epoch: updates in an epoch, as this process makes them.
        total_steps: T; or give the two before it.
        num_warmup_steps: updates of warmup; None: a hundredth of T.
        decay_phase_ratio: the part of a period that is decay, from 0 to 1.
        lr_min: the end of a decay, as a part of the base rate.
        warmup_starting_lr: where the warmup starts.
        use_inverse_sqrt_decay: the first of the two forms of decay, else the second.
        num_checkpoints: how many periods.
        is_continuation_from_checkpoint: the run goes on from a checkpoint: there is no warmup, and loading a state
            takes only ``decay_phase_ratio`` from it and starts counting anew.

    Attributes:
        checkpoint_steps: the updates at which periods end.
        checkpoint_decay_info: see :meth:`get_decay_info`.
        previous_checkpoint_step: None; kept for scripts that read it.

    Raises:
        ValueError: T is given twice or not at all; ``warmup_starting_lr`` is above the largest base rate; there are
            several checkpoints, and decays take more than a third.
        AssertionError: an argument is out of its range.
    """

    def __init__(
        self, optimizer: Any, num_epochs: int | None = None, num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None, num_warmup_steps: int | None = 0, decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6, warmup_starting_lr: float = 1e-6, use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1, is_continuation_from_checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        self.total_steps = _total(num_epochs, num_update_steps_per_epoch, total_steps)
        self.num_warmup_steps = int(0.01 * self.total_steps) if num_warmup_steps is None else num_warmup_steps
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
        """Part the run into periods."""
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
        """The rate of each group after so many updates."""
        warmup = 0 if self.is_continuation_from_checkpoint else self.num_warmup_steps
        if num_updates < warmup:
            part = num_updates / warmup
            start = self.warmup_starting_lr
            return [start + part * (base - start) for base in self.base_lr_values]
        length, step = self._get_checkpoint_info(num_updates)
        decay = int(length * self.decay_phase_ratio)
        r = min((step - (length - decay)) / decay, 1.0) if decay else 0.0
        return [base * self._decayed(r) for base in self.base_lr_values]

    def _decayed(self, r: float) -> float:
        """The part of the base rate that is left at a point of the decay."""
        if r <= 0:
            return 1.0
        if self.use_inverse_sqrt_decay:
            return self.lr_min + (1 - self.lr_min) * (1 - r**0.5)  # type: ignore[no-any-return]
        return self.lr_min / (r + (1 - r) * self.lr_min)  # 1 / (r / lr_min + 1 - r), which lr_min=0 would break

    def _get_checkpoint_info(self, num_updates: int) -> tuple[int, int]:
        """The length of the period in which an update is, and how many steps of that are before it."""
        info = next((i for i in self.checkpoint_decay_info if num_updates < i["period_end"]), None)
        info = info or self.checkpoint_decay_info[-1]
        return info["period_end"] - info["period_start"], num_updates - info["period_start"]

    # Nothing is kept any more; scripts of the original that clear what was kept still run.
    _get_checkpoint_info.cache_clear = lambda: None  # type: ignore[attr-defined]

    def get_checkpoint_steps(self) -> list[int]:
        """The updates at which periods end."""
        return list(self.checkpoint_steps)

    def get_decay_info(self) -> list[dict[str, int]]:
        """Of each period ``period_start``, ``period_end``, ``decay_steps`` and ``pre_decay_step``, at which its decay
        starts."""
        return [dict(info) for info in self.checkpoint_decay_info]

    def get_phase_info(self, step: int) -> dict[str, int]:
        """The period that so many updates belong to, of :meth:`get_decay_info`: the last of a period to that one."""
        info = next((i for i in self.checkpoint_decay_info if step <= i["period_end"]), None)
        return dict(info or self.checkpoint_decay_info[-1])

    def get_current_step(self) -> int:
        """The updates whose value is set: one less than were made, so -1 at first."""
        return self._num_updates

    def get_current_phase_info(self) -> dict[str, int]:
        """:meth:`get_phase_info` of :meth:`get_current_step`."""
        return self.get_phase_info(self._num_updates)

    def state_dict(self) -> dict[str, Any]:
        """The public attributes but the optimizer, and how far the schedule is."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "optimizer"}
        return {**public, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a saved schedule; in a continuation start a new one, with the saved ratio of decay.

        What the state lacks stays as it is.
        """
        if not self.is_continuation_from_checkpoint:
            self._restore(state_dict)
            return
        self.decay_phase_ratio = state_dict.get("decay_phase_ratio", self.decay_phase_ratio)
        self.previous_checkpoint_step = None
        self._num_updates = -1
        self._set_periods()

    def _restore(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to a state of this very run, also of one that is a continuation."""
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
        """What to pass to ``train(create_scheduler_fn=)``: the scheduler over the whole run, unless told otherwise.

        ``num_warmup_epochs=None`` is a warmup of a hundredth of the run.
        """
        arguments: dict[str, Any] = {name: value for name, value in locals().items() if name != "cls"}
        arguments["num_epochs"] = arguments.pop("total_num_epochs")
        del arguments["num_warmup_epochs"]
        warmup = None if num_warmup_epochs is None else num_update_steps_per_epoch * num_warmup_epochs
        return partial(cls, num_warmup_steps=warmup, **arguments)  # the trainer replaces placeholders


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int) -> list[int]:
    """The updates at which the periods of a run end: each period ends at twice the update of the one before it.

    Args:
        total_steps: updates of the run, at which the last period ends.
        num_checkpoints: how many periods; there are fewer where the run is too short for so many halves.
    """
    steps = {total_steps >> (num_checkpoints - 1 - i) for i in range(num_checkpoints)}
    return sorted(steps - {0})


def _total(num_epochs: int | None, num_update_steps_per_epoch: int | None, total_steps: int | None) -> int:
    if total_steps is None:
        if num_epochs is None or num_update_steps_per_epoch is None:
            raise ValueError("give total_steps, or num_epochs and num_update_steps_per_epoch")
        total_steps = num_epochs * num_update_steps_per_epoch
    elif num_epochs is not None and num_update_steps_per_epoch is not None:
        raise ValueError("give total_steps, or num_epochs and num_update_steps_per_epoch, not all three")
    if not total_steps > 0:
        raise AssertionError(f"the run must have updates, not {total_steps}")
    return total_steps
