"""Order of actions in a training: a pure state machine as a generator, without torch, I/O and clocks.

The runner carries out each action and sends back its result. The result must be equal on every rank, so that every rank
receives the same next action.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Generator
from dataclasses import dataclass
from typing import Any

LOOKAHEAD = 4096
"""Number of batches to search ahead for a boundary if the length is unbounded."""


@dataclass(frozen=True)
class TrainUnit:
    """A number of batches or epochs, or a container of some: see :class:`Batch` and :class:`Epoch`."""

    value: int | Container[int]

    def __post_init__(self) -> None:
        if isinstance(self.value, bool | str) or not isinstance(self.value, int | Container):
            raise TypeError(f"{type(self).__name__}({self.value!r}): expected an integer, or a container of integers")

    def _has(self, count: int) -> bool:
        if isinstance(self.value, int):
            return self.value < 1 or count % self.value == 0
        return count in self.value


class Batch(TrainUnit):
    """Batches of one rank: ``Batch(100)`` is every 100 batches, ``Batch([5, 30])`` is after the 5th and the 30th."""


class Epoch(TrainUnit):
    """Epochs: ``Epoch(1)`` is every epoch, ``Epoch(range(5, 10))`` is after epochs 5 to 9."""


class Boundary(enum.Enum):
    """Reason for a pause of training after a batch, in the order of handling."""

    TRAIN = enum.auto()
    VALIDATE = enum.auto()
    CHECKPOINT = enum.auto()
    REPORT = enum.auto()


@dataclass
class Counters:
    """Progress of a trial. The runner updates it before it sends a result.

    Attributes:
        trial_id: ID of the trial; 0 in a bare run.
        batches_trained, epochs_trained: numbers that each rank has trained.
        last_val: ``batches_trained`` at the last validation; 0 before.
        last_ckpt: ``batches_trained`` at the last checkpoint; 0 before.
        step_id: always 0; part of Determined's file format.
        fit: number of this ``fit()`` in its script, from 1.
        batches_before: batches trained by earlier fits.
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
        """Step of rows and checkpoints: batches trained by all fits of the script."""
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
    """Periods of validations, checkpoints and reports.

    Attributes:
        epoch_len: batches of one rank in an epoch; None if an epoch never ends.
        validation, checkpoint, report: the periods; None: never.
    """

    epoch_len: int | None
    validation: TrainUnit | None = None
    checkpoint: TrainUnit | None = None
    report: TrainUnit | None = None

    def due(self, batches: int, length: int | None) -> list[Boundary]:
        """Return the boundaries reached after a number of batches.

        Args:
            batches: number of batches trained in total.
            length: length of the operation in batches, or None.
        """
        units = {Boundary.VALIDATE: self.validation, Boundary.CHECKPOINT: self.checkpoint, Boundary.REPORT: self.report}
        reached = [boundary for boundary, unit in units.items() if unit is not None and self._at(unit, batches)]
        if length is not None and batches >= length:
            reached.insert(0, Boundary.TRAIN)
        return reached

    def next_boundary(self, batches: int, length: int | None) -> int:
        """Return the first count above ``batches`` with a boundary, at most :data:`LOOKAHEAD` more."""
        limit = batches + LOOKAHEAD
        if length is not None:
            limit = max(length, batches + 1)
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
        stride = 1
        if isinstance(unit, Epoch):
            stride = self.epoch_len or 1
        if isinstance(unit.value, int):
            step = stride * max(unit.value, 1)
            return min((after // step + 1) * step, limit)
        first = (after // stride + 1) * stride
        limit = min(limit, after + LOOKAHEAD)
        return next((n for n in range(first, limit, stride) if n // stride in unit.value), limit)


@dataclass(frozen=True)
class Train:
    """Train until ``until`` batches or an agreed stop; the result is whether to stop."""

    until: int


@dataclass(frozen=True)
class Report:
    """Report the metrics of the batches since the last report."""


@dataclass(frozen=True)
class Progress:
    """Report the progress of the operation."""


@dataclass(frozen=True)
class Validate:
    """Validate, and complete the operation if ``completes``; the result is whether the policy asks for a checkpoint."""

    completes: bool


@dataclass(frozen=True)
class Checkpoint:
    """Save a checkpoint."""


@dataclass(frozen=True)
class AskStop:
    """Check for a stop; the result is whether to stop."""


Action = Train | Report | Progress | Validate | Checkpoint | AskStop


class Outcome(enum.Enum):
    """Result of an operation."""

    COMPLETED = enum.auto()
    LEFT_OPEN = enum.auto()
    """There was nothing to train or validate, in a bare run that was complete."""
    STOPPED = enum.auto()
    """All ranks stopped after a checkpoint."""


def operation(
    counters: Counters, schedule: Schedule, length: int | None, *, handed_out: bool = False
) -> Generator[Action, Any, Outcome]:
    """Yield the actions of one operation, starting from the counters.

    A validation that is due at the start, because a stop came before it, is first. At a boundary, the workload is
    reported, then each :class:`Boundary` is handled in order, with a check for a stop after each. A stop between two
    boundaries is handled like a boundary: report, save, leave.

    Args:
        counters: progress, updated by the runner.
        schedule: periods of actions.
        length: total number of batches to train; None trains without end.
        handed_out: whether a master handed out the operation, which then ends with a validation in any case.
    """
    completed = False

    def validate() -> Generator[Action, Any, None]:
        nonlocal completed
        completes = not completed and length is not None and counters.batches_trained >= length
        wanted = yield Validate(completes)  # may take long: a stop is checked after its checkpoint
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
        has_reported = False
        for boundary in due:
            if stop:
                break
            if boundary in (Boundary.TRAIN, Boundary.REPORT) and not has_reported and not completed:
                has_reported = True
                yield Progress()
            if boundary is Boundary.VALIDATE and not counters.validated:
                yield from validate()
            if boundary is Boundary.CHECKPOINT and not counters.saved:
                yield Checkpoint()
            if not completed:  # else a stop would separate the last validation from its checkpoint
                stop = yield AskStop()
    if stop:
        if not counters.saved:
            yield Checkpoint()
        return Outcome.STOPPED
    # The master waits for a validation of its operation, also of one that was complete before a restart.
    if not counters.validated or (handed_out and not completed):
        yield from validate()
    if completed and not counters.saved:
        yield Checkpoint()
    if completed:
        return Outcome.COMPLETED
    return Outcome.LEFT_OPEN
