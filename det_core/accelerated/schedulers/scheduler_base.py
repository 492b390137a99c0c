"""Base classes of schedulers, which set values of parameter groups as a function of the number of updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class SchedulerBase(ABC):
    """Scheduler of a field of an optimizer's parameter groups, without a counter of updates.

    Args:
        optimizer: the optimizer.
        param_group_field: name of a numeric field, such as ``"lr"`` or ``"weight_decay"``.

    Attributes:
        base_lr_values: initial value of the field in each group, stored in the group as ``initial_{field}``. If that
            exists it is kept, so a scheduler that follows another has the same base values; the current value is
            reset to it.

    Raises:
        KeyError: If a group lacks the field.
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
        """Return one value for all groups, or one for each group, or None to change nothing."""

    def step_update(self, num_updates: int) -> None:
        """Set the values for a number of updates.

        Raises:
            ValueError: If :meth:`get_updated_values` returns a wrong number of values.
        """
        updated: Any = self.get_updated_values(num_updates)
        if updated is None:
            return
        groups = len(self.optimizer.param_groups)
        try:
            values = list(updated)
        except TypeError:  # a number, numpy scalar or tensor
            values = [updated] * groups
        if len(values) != groups:
            raise ValueError(
                f"{type(self).__name__}.get_updated_values() returned {len(values)} values for {groups} parameter "
                "groups: expected one number, or one for each group"
            )
        self._write(values)

    def _write(self, values: Sequence[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            now = group[self.param_group_field]
            if isinstance(now, Tensor):  # compiled and capturable optimizers read this tensor object
                now.fill_(value)
            else:
                group[self.param_group_field] = _number(value)

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes except the optimizer."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the return value of :meth:`state_dict`."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """Scheduler that counts updates, with the ``step()`` of torch's schedulers.

    The trainer calls it after each update. The first call applies the value for 0 updates: update 1 uses the value set
    by the constructor, and update ``k + 1`` uses ``get_updated_values(k - 1)``.

    Args:
        optimizer: the optimizer.
        param_group_field: name of a numeric field.
    """

    def __init__(self, optimizer: Any, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    def step(self) -> None:
        """Count one update and set the values."""
        self._num_updates += 1
        self.step_update(self._num_updates)


def _number(value: Any) -> Any:
    """Convert a tensor or numpy scalar to a Python number, which ``weights_only`` can read from a checkpoint."""
    if hasattr(value, "item"):
        return value.item()
    return value
