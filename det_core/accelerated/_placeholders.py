"""Numbers of a run that are known only once its loaders are made, and arithmetic with them.

An expression is built by Python's own operators and worked out by them later: no text is evaluated.
"""

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
    """The method of an operator, and of the same with the placeholder on its right."""

    def method(left: Placeholder, right: Any) -> Any:
        return _Expression(function, left, right) if isinstance(right, Real | Placeholder) else NotImplemented

    def reflected(right: Placeholder, left: Any) -> Any:
        return _Expression(function, left, right) if isinstance(left, Real) else NotImplemented

    return method, reflected


class Placeholder:
    """What stands for a number: a member of :class:`TrainerPlaceholderValues`, or arithmetic with such members.

    ``+``, ``-``, ``*``, ``/`` and ``//`` with numbers and other placeholders, on either side, give placeholders.
    """

    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv)


class TrainerPlaceholderValues(Placeholder, Enum):
    """Stand for numbers of a run in the arguments of a ``create_scheduler_fn``; the trainer puts the numbers in.

    They can be calculated with: ``step_size=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH * 7``. A result that is
    a whole number arrives as an int.
    """

    NUM_EPOCHS = "epochs of the run"
    NUM_UPDATE_STEPS_PER_EPOCH = "updates in an epoch, those of all processes added up"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "updates in an epoch of one process: how often its scheduler steps"
    TRAIN_DATALOADER_LEN = "batches of the training loader"
    EVAL_DATALOADER_LEN = "batches of the evaluation loader"

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """The names of all placeholders."""
        return {member.name for member in cls}


@dataclass(frozen=True)
class _Expression(Placeholder):
    """``function(left, right)``, once the placeholders in both are known."""

    function: Callable[[Any, Any], Any]
    left: Any
    right: Any


def replace_trainer_placeholder_values(trainer: Any, instance: Any) -> Any:
    """Put a run's numbers in the place of placeholders.

    Args:
        trainer: the trainer whose run is meant; it has its ``run_config`` and loaders.
        instance: a ``functools.partial``; placeholders are looked for in its positional and keyword arguments, in
            lists and tuples among these, and in partials of any depth.

    Returns:
        A new partial; anything that is no partial comes back unchanged.

    Raises:
        ValueError: a length is needed that nobody knows, such as that of an iterable dataset.
    """
    if not isinstance(instance, functools.partial):
        return instance
    function = replace_trainer_placeholder_values(trainer, instance.func)
    arguments = [_replaced(trainer, value) for value in instance.args]
    keywords = {name: _replaced(trainer, value) for name, value in instance.keywords.items()}
    return functools.partial(function, *arguments, **keywords)


def _replaced(trainer: Any, value: Any) -> Any:
    """An argument without placeholders."""
    if isinstance(value, Placeholder):
        number = _number(trainer, value)
        return int(number) if isinstance(number, float) and number.is_integer() else number
    if type(value) in (list, tuple):  # milestones=[P * 30, P * 60]
        items = [_replaced(trainer, item) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return replace_trainer_placeholder_values(trainer, value)


def _number(trainer: Any, value: Any) -> Any:
    """What an operand comes to."""
    if isinstance(value, _Expression):
        return value.function(_number(trainer, value.left), _number(trainer, value.right))
    if not isinstance(value, TrainerPlaceholderValues):
        return value
    number, otherwise = _looked_up(trainer, value)
    if number is None:
        raise ValueError(f"the placeholder {value.name} has no value in this run: {otherwise}")
    return number


def _looked_up(trainer: Any, placeholder: TrainerPlaceholderValues) -> tuple[int | None, str]:
    """A placeholder's number (None: unknown), and what to do where it is unknown."""
    which = TrainerPlaceholderValues
    config = trainer.run_config
    if placeholder is which.NUM_EPOCHS:
        return config.num_epochs, "the run has no epochs"
    if placeholder is which.TRAIN_DATALOADER_LEN:
        return length_of(trainer._train_dataloader), "the training loader has no length; give the number itself"
    if placeholder is which.EVAL_DATALOADER_LEN:
        if trainer._eval_dataloader is None:
            return None, "there is no evaluation dataset"
        return length_of(trainer._eval_dataloader), "the evaluation loader has no length; give the number itself"
    local = placeholder is which.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH
    number = config.num_local_update_steps_per_epoch if local else config.num_update_steps_per_epoch
    if number is None and config.max_num_train_steps is not None:
        # a loader without a length: the epochs share the updates that the run is limited to
        shares = max(config.num_epochs, 1) * (config.num_processes if local else 1)
        number = math.ceil(config.max_num_train_steps / shares)
    return number, "the training loader has no length; pass max_num_train_steps to train()"
