"""What comes next in a training: a pure state machine, told as a generator. No torch, no I/O, no clock.

The runner carries out one action after the other and sends back what came of it. Every answer must be the same on every
rank, and so every rank is told the same next action.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Generator
from dataclasses import dataclass
from typing import Any

FAR = 4096
"""How many batches ahead a boundary is looked for where nothing bounds the length."""


@dataclass(frozen=True)
class TrainUnit:
    """A number of batches or epochs, or the ones in a container: see :class:`Batch` and :class:`Epoch`."""

    value: int | Container[int]

    def __post_init__(self) -> None:
        if isinstance(self.value, bool | str) or not isinstance(self.value, int | Container):
            raise TypeError(f"{type(self).__name__}({self.value!r}): expected a whole number, or a container of some")

    def _has(self, count: int) -> bool:
        if isinstance(self.value, int):
            return self.value < 1 or count % self.value == 0
        return count in self.value


class Batch(TrainUnit):
    """So many batches of one rank: ``Batch(100)`` is every 100, ``Batch([5, 30])`` after the 5th and the 30th."""


class Epoch(TrainUnit):
    """So many epochs: ``Epoch(1)`` is every one, ``Epoch(range(5, 10))`` after some of them."""


class Boundary(enum.Enum):
    """Why training pauses after a batch, in the order in which it is seen to."""

    TRAIN = enum.auto()
    VALIDATE = enum.auto()
    CHECKPOINT = enum.auto()
    REPORT = enum.auto()


@dataclass
class Counters:
    """How far a trial is. The runner changes them before it answers.

    Attributes:
        trial_id: whose they are; 0 in a bare run.
        batches_trained, epochs_trained: how many a rank has trained, from 0.
        last_val: ``batches_trained`` of the last validation; 0: none.
        last_ckpt: of the last checkpoint.
        step_id: stays 0; the original's files have it.
        fit: which ``fit()`` of its script it is, from 1.
        batches_before: trained by the ones before.
    """

    trial_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
    last_val: int = 0
    last_ckpt: int = 0
    step_id: int = 0
    fit: int = 1
    batches_before: int = 0

    @property
    def step(self) -> int:
        """What rows and checkpoints count: the batches of all fits of the script."""
        return self.batches_before + self.batches_trained

    @property
    def validated(self) -> bool:
        """Whether nothing was trained since the last validation."""
        return self.last_val == self.batches_trained

    @property
    def saved(self) -> bool:
        """Whether nothing was trained since the last checkpoint."""
        return self.last_ckpt == self.batches_trained


@dataclass(frozen=True)
class Schedule:
    """When what is due.

    Attributes:
        epoch_len: batches of one rank in an epoch; None: an epoch never ends.
        validation, checkpoint, report: the periods; None: never.
    """

    epoch_len: int | None
    validation: TrainUnit | None = None
    checkpoint: TrainUnit | None = None
    report: TrainUnit | None = None

    def due(self, batches: int, length: int | None) -> list[Boundary]:
        """The boundaries that are reached after so many batches.

        Args:
            batches: trained in all.
            length: of the operation; None: it has none.
        """
        units = {Boundary.VALIDATE: self.validation, Boundary.CHECKPOINT: self.checkpoint, Boundary.REPORT: self.report}
        first = [Boundary.TRAIN] if length is not None and batches >= length else []
        return first + [boundary for boundary, unit in units.items() if unit is not None and self._at(unit, batches)]

    def next_boundary(self, batches: int, length: int | None) -> int:
        """The first count above ``batches`` at which a boundary is reached, or :data:`FAR` further on."""
        limit = batches + FAR if length is None else max(length, batches + 1)
        units = (self.validation, self.checkpoint, self.report)
        return min(self._next(unit, batches, limit) for unit in units)

    def _at(self, unit: TrainUnit, batches: int) -> bool:
        if batches <= 0 or not isinstance(unit, Epoch):
            return batches > 0 and unit._has(batches)
        epochs, rest = divmod(batches, self.epoch_len or batches + 1)
        return not rest and unit._has(epochs)

    def _next(self, unit: TrainUnit | None, after: int, limit: int) -> int:
        if unit is None or (isinstance(unit, Epoch) and not self.epoch_len):
            return limit
        stride = (self.epoch_len or 1) if isinstance(unit, Epoch) else 1
        if isinstance(unit.value, int):
            step = stride * max(unit.value, 1)
            return min((after // step + 1) * step, limit)
        first, limit = (after // stride + 1) * stride, min(limit, after + FAR)
        return next((n for n in range(first, limit, stride) if n // stride in unit.value), limit)


@dataclass(frozen=True)
class Train:
    """Train batches until so many are trained or a stop is agreed on; the answer: whether to stop."""

    until: int


@dataclass(frozen=True)
class Report:
    """Report the metrics of the batches since the last report."""


@dataclass(frozen=True)
class Progress:
    """Say how far the operation is."""


@dataclass(frozen=True)
class Validate:
    """Validate, and complete the operation if ``completes``; the answer: whether the policy wants a checkpoint."""

    completes: bool


@dataclass(frozen=True)
class Checkpoint:
    """Save."""


@dataclass(frozen=True)
class AskStop:
    """Ask whether to stop; the answer: whether to."""


Action = Train | Report | Progress | Validate | Checkpoint | AskStop


class Outcome(enum.Enum):
    """How an operation ended."""

    COMPLETED = enum.auto()
    LEFT_OPEN = enum.auto()
    """There was nothing to train or validate, in a bare run that was done before."""
    STOPPED = enum.auto()
    """A stop was agreed on; a checkpoint has been saved."""


def operation(
    counters: Counters, schedule: Schedule, length: int | None, *, handed_out: bool = False
) -> Generator[Action, Any, Outcome]:
    """One operation, from wherever the counters stand.

    A validation that is due where the counters stand, and was dropped by a stop, comes first. At a boundary the
    workload is reported, then each boundary is seen to in the order of :class:`Boundary`, and after each it is asked
    whether to stop. A stop in between is a boundary of its own: report, save, leave.

    Args:
        counters: changed by whoever carries out the actions.
        schedule: when what is due.
        length: batches to have trained in all; None: without end.
        handed_out: the operation is a master's, so it is open: it is validated at its length, whatever was before.
    """
    completed = False

    def validate() -> Generator[Action, Any, None]:
        nonlocal completed
        completes = not completed and length is not None and counters.batches_trained >= length
        wanted = yield Validate(completes)
        completed = completed or completes
        if wanted and not counters.saved:
            yield Checkpoint()

    stop = False
    if Boundary.VALIDATE in schedule.due(counters.batches_trained, None) and not counters.validated:
        yield from validate()
        stop = yield AskStop()
    while not stop and (length is None or counters.batches_trained < length):
        stop = yield Train(schedule.next_boundary(counters.batches_trained, length))
        due = schedule.due(counters.batches_trained, length)
        if not due and not stop:
            continue
        yield Report()
        told = False
        for boundary in () if stop else due:
            if boundary in (Boundary.TRAIN, Boundary.REPORT) and not told and not completed:
                told = True
                yield Progress()
            if boundary is Boundary.VALIDATE and not counters.validated:
                yield from validate()
            if boundary is Boundary.CHECKPOINT and not counters.saved:
                yield Checkpoint()
            if not completed:  # else a stop would only part the last validation from its checkpoint
                stop = yield AskStop()
            if stop:
                break
    if stop:
        if not counters.saved:
            yield Checkpoint()
        return Outcome.STOPPED
    if not counters.validated or (handed_out and not completed):
        yield from validate()
    if completed and not counters.saved:
        yield Checkpoint()
    return Outcome.COMPLETED if completed else Outcome.LEFT_OPEN
