"""Operations of a hyperparameter search, or the one operation of a bare run."""

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
    """Unit of the length of an operation."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherMode(enum.Enum):
    """Ranks that may call :meth:`SearcherContext.operations`."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    """All ranks iterate in step; the chief fetches the operations for all."""
    ChiefOnly = "CHEIF_ONLY"
    """Only the chief iterates; the script passes the operations on to the workers."""
    # The value is misspelled on purpose: scripts compare with it.


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
        """Target length in the searcher's units, of the training in all, not of this operation alone."""
        return self._length

    @property
    def completed(self) -> bool:
        """Whether :meth:`report_completed` was called on this rank."""
        return self._completed

    def report_progress(self, length: float) -> None:
        """Report the progress of the training, on the chief.

        Args:
            length: units trained in all; a finite number of 0 or more.

        Raises:
            RuntimeError: If this is not the chief, or the operation is completed.
            ValueError, TypeError: If ``length`` is not such a number.
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
            searcher_metric: validation metric of the search; a number (also a numpy or torch scalar). Defaults to the
                metric of the last validation in the run's record, which a script that was resumed with nothing left to
                train does not have.

        Raises:
            RuntimeError: If this is not the chief, or it was called before; or the record has no such metric, or
                nothing names it.
            TypeError: If the metric is not a number.
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
    """Operations to train.

    Args:
        distributed: the ranks that train together.
        backend: returns the next operation.
        record: writes a record of a kind to the journal.
        units: unit of lengths, if configured.

    Attributes:
        metric: validation metric of the search, from the experiment's configuration or
            ``core.init(searcher_metric=)``, or None.
        smaller_is_better: whether a smaller metric is better.
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
        self._acknowledged = False

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Iterate over the operations until none is left.

        Args:
            searcher_mode: see :class:`SearcherMode`.
            auto_ack: acknowledge the end of operations; else call :meth:`acknowledge_out_of_ops` before exiting.

        Raises:
            RuntimeError: On a worker in the mode ChiefOnly; or if the chief advances before ``report_completed()`` was
                called on the last operation.
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
        """Declare that this process exits because no operation is left for now, on the chief."""
        self._require_open("acknowledge_out_of_ops")
        if self._distributed.rank != 0:
            raise RuntimeError("acknowledge_out_of_ops() may only be called on the chief (rank 0)")
        if not self._acknowledged:
            self._acknowledged = True
            self._record("out_of_operations", {})
            self._backend.acknowledge_out_of_operations()

    def get_configured_units(self) -> Unit | None:
        """Return the unit of lengths, or None if ``max_length`` is a plain number."""
        return self._units

    def units_per_batch(self, batch_size: int | None, default: Unit | None = None) -> int | None:
        """Return searcher units per batch, None for epochs.

        Args:
            batch_size: records in a batch of all ranks, or None if unknown.
            default: unit to use if none is configured.

        Raises:
            ValueError: If the unit is records and ``batch_size`` is None, or if no unit is known.
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
        """Return the value of the searcher metric among ``metrics``.

        Raises:
            RuntimeError: If it is missing or not a number.
        """
        if self.metric is None or self.metric not in metrics:
            reported = ", ".join(sorted(metrics)) or "none"
            raise RuntimeError(f"searcher metric {self.metric!r} missing; reported validation metrics: {reported}")
        value = metrics[self.metric]
        try:
            return float(_number(value, self.metric))
        except (TypeError, ValueError, RuntimeError):  # the latter two are an array's and a tensor's item()
            raise RuntimeError(
                f"the validation metric {self.metric!r} is {value!r}: the searcher metric must be a number"
            ) from None

    def close(self) -> None:
        """End the iteration: the next operation raises ContextClosed."""
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
                    f"operations() advanced before report_completed() of {operation!r}; without an argument that takes "
                    "the last validation's metric; to stop early, break"
                )

    def _last_metric(self) -> float:
        if self.metric is None:
            raise RuntimeError(
                "report_completed() without a number takes the metric of the last validation, but none is named: pass "
                "core.init(searcher_metric=), or the number"
            )
        return self.metric_of(self._backend.last_validation_metrics())

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise ContextClosed(f"{method}() was called on a context that is closed")


def configured_length(max_length: Any) -> tuple[int, Unit | None]:
    """Return the length and the unit of ``max_length``; see :func:`det_core._length.parse_length`."""
    length, unit = parse_length(max_length, "max_length")
    if unit is None:
        return length, None
    return length, Unit[unit.upper()]


def _number(value: Any, name: str) -> int | float:
    """Return ``value`` as a Python number."""
    number = value
    # Scalars of numpy and torch have item(); neither library may be imported for them here.
    if callable(item := getattr(value, "item", None)):
        number = item()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return number


def _finite(value: Any, name: str) -> float:
    number = float(_number(value, name))
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{name} is {number}: expected a finite number")
    return number
