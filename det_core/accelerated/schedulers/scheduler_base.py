"""What schedulers share: values go into an optimizer's groups; a schedule is a function of the number of updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class SchedulerBase(ABC):
    """Sets a field of an optimizer's parameter groups from the number of updates; keeps no count itself.

    Args:
        optimizer: the optimizer.
        param_group_field: a field that holds a number, such as ``"lr"`` or ``"weight_decay"``.

    Attributes:
        base_lr_values: what each group began with. It is also kept in the group, under ``initial_{field}``, and what
            is there already holds: a scheduler that follows another begins where that one began.

    Raises:
        KeyError: a group has no such field.
    """

    def __init__(self, optimizer: Any, param_group_field: str = "lr") -> None:
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        for i, group in enumerate(optimizer.param_groups):
            if param_group_field not in group:
                raise KeyError(f"{param_group_field} missing from param_groups[{i}]")
            group.setdefault(f"initial_{param_group_field}", _number(group[param_group_field]))
        self.base_lr_values = [_number(group[f"initial_{param_group_field}"]) for group in optimizer.param_groups]
        self._write(self.base_lr_values)

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> float | Sequence[float] | None:
        """The values after so many updates: one for all groups, one for each of them, or None: no change."""

    def step_update(self, num_updates: int) -> None:
        """Set the values after so many updates.

        Raises:
            ValueError: :meth:`get_updated_values` gave another number of values than there are groups.
        """
        found: Any = self.get_updated_values(num_updates)
        if found is None:
            return
        groups = len(self.optimizer.param_groups)
        try:
            values = list(found)
        except TypeError:  # a number, also one of numpy's or a tensor's
            values = [found] * groups
        if len(values) != groups:
            raise ValueError(
                f"{type(self).__name__}.get_updated_values() gave {len(values)} values for {groups} parameter groups: "
                "it must give one number, or one for each group"
            )
        self._write(values)

    def _write(self, values: Sequence[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            now = group[self.param_group_field]
            if isinstance(now, Tensor):  # as compiled and capturable optimizers have it, which look at this very tensor
                now.fill_(value)
            else:
                group[self.param_group_field] = _number(value)

    def state_dict(self) -> dict[str, Any]:
        """All attributes but the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the attributes that :meth:`state_dict` gave."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """A scheduler that counts the updates itself and has the ``step()`` of torch's schedulers.

    The trainer calls it after each update. The first call applies the value of 0 updates: update 1 is made at the
    rate that the optimizer was built with, and update ``k + 1`` at ``get_updated_values(k - 1)``.

    Args:
        optimizer: the optimizer.
        param_group_field: a field that holds a number.
    """

    def __init__(self, optimizer: Any, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count one update and set the values."""
        self._num_updates += 1
        self.step_update(self._num_updates)


def _number(value: Any) -> Any:
    """A plain number, which a checkpoint that is read with weights_only may hold, of a tensor's or numpy's."""
    return value.item() if hasattr(value, "item") else value
