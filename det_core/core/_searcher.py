"""What to train next: the operations of a hyperparameter search, or the one operation of a bare run."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from det_core._length import parse_length
from det_core.backend import Backend
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import on_chief
from det_core.errors import ContextClosed

_Record = Callable[[str, Mapping[str, Any]], None]


class Unit(enum.Enum):
    """What the length of an operation counts."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherMode(enum.Enum):
    """Who may call :meth:`SearcherContext.operations`."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ranks iterate in step; the chief asks and tells the workers."""
    ChiefOnly = "CHEIF_ONLY"
    """Only the chief iterates; telling the workers is up to the script. (The value is spelled as scripts know it.)"""


class SearcherOperation:
    """A request to train to a cumulative length, validate, and report the searcher metric."""

    def __init__(
        self, length: int, *, is_chief: bool, backend: Backend, record: _Record, last_metric: Callable[[], float]
    ) -> None:
        self._last_metric = last_metric
        self._length = length
        self._is_chief = is_chief
        self._backend = backend
        self._record = record
        self._completed = False

    def __repr__(self) -> str:
        return f"SearcherOperation(length={self._length}, completed={self._completed})"

    @property
    def length(self) -> int:
        """How far to have trained in all, in the searcher's units: absolute, not incremental."""
        return self._length

    @property
    def completed(self) -> bool:
        """Whether :meth:`report_completed` was called here."""
        return self._completed

    def report_progress(self, length: float) -> None:
        """Report how far training has come, on the chief.

        Args:
            length: units trained in all; a finite number from 0 on.

        Raises:
            RuntimeError: not the chief, or progress after completion.
            ValueError, TypeError: ``length`` is no such number.
        """
        self._require_chief("report_progress")
        value = _finite(length, "length")
        if value < 0:
            raise ValueError(f"length is {length}: progress counts from 0")
        if self._completed and value != self._length:
            raise RuntimeError("report_progress() was called after report_completed() of the same operation")
        self._record("progress", {"units": value, "length": self._length})

    def report_completed(self, searcher_metric: Any = None) -> None:
        """Report that this operation is done, on the chief, exactly once.

        Args:
            searcher_metric: the validation metric that is searched over; a number (numpy and torch scalars too).
                Defaults to None: that of the last validation in the run's record, which a script that was resumed with
                nothing left to train has not at hand.

        Raises:
            RuntimeError: not the chief, or called twice; or the record has no such metric, or nothing names it.
            TypeError: the metric is no number.
        """
        self._require_chief("report_completed")
        if self._completed:
            raise RuntimeError(f"report_completed() was called twice for the operation of length {self._length}")
        metric = self._last_metric() if searcher_metric is None else _number(searcher_metric, "searcher_metric")
        self._record("operation", {"length": self._length, "searcher_metric": metric})
        self._backend.complete_operation(self._length, metric)
        self._completed = True

    def _require_chief(self, method: str) -> None:
        if not self._is_chief:
            raise RuntimeError(f"{method}() may only be called on the chief (rank 0)")


class SearcherContext:
    """Gives the operations to train.

    Args:
        distributed: the ranks that train together.
        backend: who says what is next.
        record: journals a fact under a kind.
        units: what lengths count, if that was configured.

    Attributes:
        metric: the validation metric that is searched over, as the experiment's configuration or
            ``core.init(searcher_metric=)`` says; None: nothing says.
        smaller_is_better: which end of it is best.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        backend: Backend,
        *,
        record: _Record,
        units: Unit | None = None,
        metric: str | None = None,
        smaller_is_better: bool = True,
    ) -> None:
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self._distributed = distributed
        self._backend = backend
        self._record = record
        self._units = units
        self._closed = False
        self._said_out_of_ops = False

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Iterate over the operations until there are no more.

        Args:
            searcher_mode: see :class:`SearcherMode`.
            auto_ack: acknowledge the end of operations; else call :meth:`acknowledge_out_of_ops` before exiting.

        Raises:
            RuntimeError: on a worker in the mode ChiefOnly; or the next operation was asked for before the chief had
                called ``report_completed()`` on the last.
        """
        if not isinstance(searcher_mode, SearcherMode):
            raise TypeError(f"searcher_mode must be a SearcherMode, not {searcher_mode!r}")
        if searcher_mode is SearcherMode.ChiefOnly and self._distributed.rank != 0:
            raise RuntimeError(
                f"rank {self._distributed.rank} called operations(), which the mode ChiefOnly allows on rank 0 alone"
            )
        self._require_open("operations")
        return self._iterate(searcher_mode, auto_ack)

    def acknowledge_out_of_ops(self) -> None:
        """Say that this process exits because there are no more operations for now, on the chief."""
        self._require_open("acknowledge_out_of_ops")
        if self._distributed.rank != 0:
            raise RuntimeError("acknowledge_out_of_ops() may only be called on the chief (rank 0)")
        if not self._said_out_of_ops:
            self._said_out_of_ops = True
            self._record("out_of_operations", {})
            self._backend.acknowledge_out_of_operations()

    def get_configured_units(self) -> Unit | None:
        """What lengths count: EPOCHS, RECORDS or BATCHES; None if ``max_length`` was given as a plain number."""
        return self._units

    def units_per_batch(self, batch_size: int | None, default: Unit | None = None) -> int | None:
        """What one batch counts in the units of lengths; None: they are epochs.

        Args:
            batch_size: records in a batch of all ranks; None: it is not known.
            default: the units, where none are configured.

        Raises:
            ValueError: lengths are records, and ``batch_size`` is None; or nothing says what they are.
        """
        units = self._units or default
        if units is Unit.RECORDS and batch_size is None:
            raise ValueError("a search in records needs a known batch size: give its lengths in batches")
        if units is None:
            raise ValueError(
                "the searcher's max_length has no unit: write it as {batches: N}, {epochs: N} or {records: N}"
            )
        return {Unit.BATCHES: 1, Unit.RECORDS: batch_size, Unit.EPOCHS: None}[units]

    def metric_of(self, metrics: Mapping[str, Any]) -> float:
        """The value of the searched-over metric among ``metrics``.

        Raises:
            RuntimeError: it is not there, or is no number.
        """
        if self.metric is None or self.metric not in metrics:
            found = ", ".join(sorted(metrics)) or "none"
            raise RuntimeError(
                f"the validation metrics have no {self.metric!r}, which is the searcher's metric: there are {found}"
            )
        value = metrics[self.metric]
        try:
            return float(_number(value, self.metric))
        except (TypeError, ValueError, RuntimeError):  # the latter two are an array's and a tensor's item()
            raise RuntimeError(
                f"the validation metric {self.metric!r} is {value!r}: the searcher's metric must be a number"
            ) from None

    def close(self) -> None:
        """End the iteration: what is asked for later raises ContextClosed."""
        self._closed = True

    def _iterate(self, mode: SearcherMode, auto_ack: bool) -> Iterator[SearcherOperation]:
        is_chief = self._distributed.rank == 0
        while True:
            self._require_open("operations")
            if mode is SearcherMode.WorkersAskChief:
                length = on_chief(self._distributed, "user", self._backend.next_operation)
            else:
                length = self._backend.next_operation()
            if length is None:
                if is_chief and auto_ack:
                    self.acknowledge_out_of_ops()
                return
            operation = SearcherOperation(
                length, is_chief=is_chief, backend=self._backend, record=self._record, last_metric=self._last_metric
            )
            yield operation
            if is_chief and not operation.completed:
                raise RuntimeError(
                    f"the next operation was asked for before report_completed() was called on {operation!r}; "
                    "without an argument that takes the last validation's metric; "
                    "to stop early, leave the loop with break or return"
                )

    def _last_metric(self) -> float:
        if self.metric is None:
            raise RuntimeError(
                "report_completed() without a number takes that of the last validation, and nothing names it: pass "
                "core.init(searcher_metric=), or the number"
            )
        return self.metric_of(self._backend.last_validation_metrics())

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise ContextClosed(f"{method}() was called on a context that is closed")


def configured_length(max_length: Any) -> tuple[int, Unit | None]:
    """Return the length and the unit of ``max_length``; see :func:`det_core._length.parse_length`."""
    length, unit = parse_length(max_length, "max_length")
    return length, None if unit is None else Unit[unit.upper()]


def _number(value: Any, name: str) -> int | float:
    """``value`` as a Python number; numpy and torch scalars by their ``item()``."""
    item = getattr(value, "item", None)
    number = item() if callable(item) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return number


def _finite(value: Any, name: str) -> float:
    number = float(_number(value, name))
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} is {number}: expected a finite number")
    return number
