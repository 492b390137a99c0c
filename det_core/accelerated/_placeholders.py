"""Placeholders for numbers of a run that are unknown before its loaders are made, and arithmetic with them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

from det_core._training.data_order import length_of


def _operator(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the methods of an operator with the placeholder on its left and on its right."""

    def method(left: Placeholder, right: Any) -> Any:
        if isinstance(right, Real | Placeholder):
            return _Expression(function, left, right)
        return NotImplemented

    def reflected(right: Placeholder, left: Any) -> Any:
        if isinstance(left, Real):
            return _Expression(function, left, right)
        return NotImplemented

    return method, reflected


class Placeholder:
    """Placeholder of a number: a member of :class:`TrainerPlaceholderValues`, or an expression of members.

    ``+``, ``-``, ``*``, ``/`` and ``//`` with numbers and other placeholders, on either side, give placeholders.
    """

    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv)


class TrainerPlaceholderValues(Placeholder, Enum):
    """Placeholders in the arguments of a ``create_scheduler_fn``, which the trainer replaces by numbers.

    Use them in expressions: ``step_size=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH * 7``. An integral result
    becomes an int.
    """

    NUM_EPOCHS = "epochs of the run"
    NUM_UPDATE_STEPS_PER_EPOCH = "updates in an epoch, those of all processes added up"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "updates in an epoch of one process: how often its scheduler steps"
    TRAIN_DATALOADER_LEN = "batches of the training loader"
    EVAL_DATALOADER_LEN = "batches of the evaluation loader"

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """Return the names of all placeholders."""
        return {member.name for member in cls}


@dataclass(frozen=True)
class _Expression(Placeholder):
    """Expression ``function(left, right)`` with placeholders."""

    function: Callable[[Any, Any], Any]
    left: Any
    right: Any


def replace_trainer_placeholder_values(trainer: Any, instance: Any) -> Any:
    """Replace placeholders by the numbers of a run.

    Args:
        trainer: trainer with ``run_config`` and loaders.
        instance: a ``functools.partial`` with placeholders in its positional and keyword arguments, in lists and tuples
            of these, and in nested partials.

    Returns:
        a new partial; other objects are returned unchanged.

    Raises:
        ValueError: If a length is unknown, such as that of an iterable dataset.
    """
    if not isinstance(instance, functools.partial):
        return instance
    function = replace_trainer_placeholder_values(trainer, instance.func)
    arguments = [_replaced(trainer, value) for value in instance.args]
    keywords = {name: _replaced(trainer, value) for name, value in instance.keywords.items()}
    return functools.partial(function, *arguments, **keywords)


def _replaced(trainer: Any, value: Any) -> Any:
    """Return an argument with its placeholders replaced."""
    if isinstance(value, Placeholder):
        number = _number(trainer, value)
        if isinstance(number, float) and number.is_integer():  # of a division
            return int(number)
        return number
    if type(value) in (list, tuple):  # milestones=[P * 30, P * 60]
        items = [_replaced(trainer, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    return replace_trainer_placeholder_values(trainer, value)


def _number(trainer: Any, value: Any) -> Any:
    """Return the number of an operand."""
    if isinstance(value, _Expression):
        return value.function(_number(trainer, value.left), _number(trainer, value.right))
    if not isinstance(value, TrainerPlaceholderValues):
        return value
    number, reason = _look_up(trainer, value)
    if number is None:
        raise ValueError(f"the placeholder {value.name} has no value in this run: {reason}")
    return number


def _look_up(trainer: Any, placeholder: TrainerPlaceholderValues) -> tuple[int | None, str]:
    """Return the number of a placeholder, or None, and the reason with advice."""
    which = TrainerPlaceholderValues
    config = trainer.run_config
    if placeholder is which.NUM_EPOCHS:
        return config.num_epochs, "the run has no epochs"
    if placeholder is which.TRAIN_DATALOADER_LEN:
        return length_of(trainer._train_dataloader), "the training loader has no length; pass the number instead"
    if placeholder is which.EVAL_DATALOADER_LEN:
        if trainer._eval_dataloader is None:
            return None, "the run has no evaluation dataset"
        return length_of(trainer._eval_dataloader), "the evaluation loader has no length; pass the number instead"
    is_local = placeholder is which.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH
    if is_local:
        number = config.num_local_update_steps_per_epoch
    else:
        number = config.num_update_steps_per_epoch
    if number is None and config.max_num_train_steps is not None:
        # Without a length, the limit of updates is divided among the epochs.
        shares = max(config.num_epochs, 1)
        if is_local:
            shares *= config.num_processes
        number = math.ceil(config.max_num_train_steps / shares)
    return number, "the training loader has no length; pass max_num_train_steps to train()"
