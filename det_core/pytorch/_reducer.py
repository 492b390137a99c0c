"""Reduce metrics of batches and ranks to one number each: averages, built-in and user-defined reducers."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from torch import Tensor

from det_core.errors import InvalidExperimentException

Row = dict[str, Any]


class Reducer(enum.Enum):
    """Reduction of a validation metric over batches. Scripts also use the numbers."""

    AVG = 1
    """Mean over batches; over ranks, weighted by numbers of batches (not of records)."""
    SUM = 2
    MAX = 3
    MIN = 4


_REDUCE: dict[Reducer, Callable[[Any], Any]] = {
    Reducer.AVG: np.mean, Reducer.SUM: np.sum, Reducer.MAX: np.max, Reducer.MIN: np.min,
}  # fmt: skip


class MetricReducer(abc.ABC):
    """A user-defined metric over batches and ranks, registered by ``context.wrap_reducer()``.

    Update it in ``train_batch`` or ``evaluate_batch`` with a method you define, such as ``update(value)``.
    """

    @abc.abstractmethod
    def reset(self) -> None:
        """Clear the values; called before each training workload and each validation."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return the contribution of this rank, which is pickled; called on every rank at the end."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: Sequence[Any]) -> Any:
        """Reduce the contributions of all ranks; called on every rank.

        Args:
            per_slot_metrics: return values of :meth:`per_slot_reduce` in the order of ranks.

        Returns:
            the value of the metric; a dictionary of metrics if the reducer is wrapped without a name.
        """


class _FunctionReducer(MetricReducer):
    """A function of the values of all ranks, in the order of the data if there is one value a batch."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add a value."""
        self._values.append(value)

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: Sequence[list[Any]]) -> Any:
        missing = object()
        # Rank r has the batches r, r + size, …
        in_order = chain.from_iterable(zip_longest(*per_slot_metrics, fillvalue=missing))
        return self._function([value for value in in_order if value is not missing])


@dataclass(frozen=True)
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool
    kind: str

    def serves(self, training: bool) -> bool:
        if training:
            return self.for_training
        return self.for_validation

    def __str__(self) -> str:
        if self.name:
            return f"reducer {self.kind} of metric {self.name!r}"
        return f"reducer {self.kind}"


class Reducers:
    """Reducers of one context in the order of wrapping, which must be the same on all ranks."""

    def __init__(self) -> None:
        self._all: list[_Wrapped] = []

    def wrap(
        self, reducer: Any, name: str | None, *, for_training: bool = True, for_validation: bool = True
    ) -> MetricReducer:
        """Register a reducer; see ``PyTorchTrialContext.wrap_reducer()``."""
        kind = getattr(reducer, "__name__", type(reducer).__name__)
        assert isinstance(reducer, MetricReducer) or callable(reducer), (
            f"wrap_reducer(): expected a MetricReducer or a function, found a {type(reducer).__name__}"
        )
        assert all(reducer is not known.reducer for known in self._all), f"{kind} is already wrapped"
        registered: MetricReducer = reducer
        if not isinstance(reducer, MetricReducer):
            registered = _FunctionReducer(reducer)
        self._all.append(_Wrapped(registered, name, for_training, for_validation, kind))
        return registered

    def any(self, *, training: bool) -> bool:
        """Return whether there are reducers for training or for validation."""
        return any(wrapped.serves(training) for wrapped in self._all)

    def signature(self) -> list[tuple[str, str | None, bool, bool]]:
        """Return the properties that must be equal on all ranks."""
        return [(w.kind, w.name, w.for_training, w.for_validation) for w in self._all]

    def reset(self) -> None:
        """Reset all reducers."""
        for wrapped in self._all:
            _calling(wrapped, wrapped.reducer.reset)

    def slots(self, *, training: bool) -> list[Any]:
        """Return the contributions of this rank."""
        return [_calling(w, w.reducer.per_slot_reduce) for w in self._all if w.serves(training)]

    def reduce(self, gathered: Sequence[Sequence[Any]], *, training: bool) -> Row:
        """Return the metrics; if two have the same name, that of the later reducer.

        Args:
            gathered: return values of :meth:`slots` on all ranks.
            training: whether they are for training.
        """
        metrics: Row = {}
        serving = [wrapped for wrapped in self._all if wrapped.serves(training)]
        for i, wrapped in enumerate(serving):
            per_rank = tuple(slots[i] for slots in gathered)
            value = _calling(wrapped, wrapped.reducer.cross_slot_reduce, per_rank)
            if wrapped.name is None:
                assert isinstance(value, dict), (
                    f"{wrapped} returned a {type(value).__name__}: expected a dict, as it is wrapped without name="
                )
                metrics.update({name: _plain(part) for name, part in value.items()})
            else:
                assert not isinstance(value, dict), f"{wrapped} returned a dict: wrap it without name="
                metrics[wrapped.name] = _plain(value)
        return metrics


def _calling(wrapped: _Wrapped, method: Callable[..., Any], *args: Any) -> Any:
    try:
        return method(*args)
    except Exception as e:
        raise ValueError(f"{wrapped}: {method.__name__}() raised {type(e).__name__}: {e}") from e


# training


def check_names(rows: Sequence[Row], method: str, first: int = 0, rows_per_batch: int = 1) -> None:
    """Raise ValueError if rows that ``method`` returned from batch ``first`` on have different names."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"{method}() returned the metrics {_names(row)} for batch {first + number // rows_per_batch}, but "
                f"{_names(rows[0])} before: it must return the same names for every batch"
            )


def _check_ranks(rows: Sequence[Row | None], method: str) -> None:
    """Raise ValueError if rows of ranks have different names; None stands for a rank without a row."""
    first, *others = [(rank, row) for rank, row in enumerate(rows) if row is not None] or [(0, {})]
    for rank, row in others:
        if row.keys() != first[1].keys():
            raise ValueError(
                f"{method}() returned the metrics {_names(row)} on rank {rank}, but {_names(first[1])} on rank "
                f"{first[0]}: it must return the same names on every rank"
            )


def training_results(per_rank: Sequence[Sequence[Row]]) -> tuple[Row, list[Row]]:
    """Return the averages of a workload, and the rows of its batches.

    Args:
        per_rank: rows of each rank, one for each batch; empty for a rank that does not report.

    Returns:
        for each name the mean over batches, and for each batch the mean over ranks. None is ignored; values without a
        mean, such as text, give None. Arrays of equal shapes are averaged element by element.

    Raises:
        ValueError: If ranks returned different names.
    """
    _check_ranks([next(iter(rows), None) for rows in per_rank], "train_batch")
    reporting = [rows for rows in per_rank if rows]
    if not reporting:
        return {}, []
    rows = list(reporting[0])
    if len(reporting) > 1:
        per_batch = zip(*reporting, strict=True)
        rows = [{name: _mean([row[name] for row in batch]) for name in batch[0]} for batch in per_batch]
    return {name: _mean([row[name] for row in rows]) for name in rows[0]}, rows


def _mean(values: list[Any]) -> Any:
    if {float}.issuperset(map(type, values)):  # the common case, ten times as fast as numpy
        return sum(values) / len(values)
    numbers = [value for value in values if value is not None]
    if not numbers or any(isinstance(value, str | bytes) for value in numbers):
        return None
    try:
        mean = np.mean(np.asarray(numbers), axis=0)
    except (TypeError, ValueError):  # arrays of different shapes, or not numbers
        return None
    if mean.ndim == 0:
        return mean.item()
    return mean


# validation


def local_results(rows: Sequence[Row], reducer: Any) -> tuple[Row, int]:
    """Reduce the batches of one rank; return the metrics and the number of batches.

    Args:
        rows: metrics of each batch; may be empty.
        reducer: a Reducer for all names, or a dictionary by name.

    Raises:
        ValueError: If batches have different names, or values of different shapes.
        TypeError: If a value is not a number.
        InvalidExperimentException: If the names of reducers and metrics differ.
    """
    if not rows:
        return {}, 0
    check_names(rows, "evaluate_batch")
    kinds = _by_name(reducer, rows[0])  # raises here, on the rank with the error, before the exchange
    return {name: _reduced(name, [row[name] for row in rows], kinds[name]) for name in rows[0]}, len(rows)


def evaluation_results(per_rank: Sequence[tuple[Row, int]], reducer: Any) -> Row:
    """Reduce the results of all ranks to the metrics of a validation.

    Args:
        per_rank: return values of :func:`local_results` on all ranks.
        reducer: a Reducer for all names, or a dictionary by name.

    Raises:
        RuntimeError: If no rank has a batch.
        ValueError: If ranks returned different names.
    """
    rows: dict[int, Row] = {rank: row for rank, (row, count) in enumerate(per_rank) if count}
    if not rows:
        raise RuntimeError("the validation loader has no batch on any rank")
    _check_ranks([rows.get(rank) for rank in range(len(per_rank))], "evaluate_batch")
    weights = [per_rank[rank][1] for rank in rows]
    metrics: Row = {}
    for name, kind in _by_name(reducer, next(iter(rows.values()))).items():
        values = [row[name] for row in rows.values()]
        if kind is Reducer.AVG:
            metrics[name] = float(np.average(values, weights=weights))
        else:
            metrics[name] = _plain(_REDUCE[kind](values))
    return metrics


def _by_name(reducer: Any, row: Row) -> dict[str, Reducer]:
    """Return the reducer of each name."""
    if isinstance(reducer, Reducer):
        return dict.fromkeys(row, reducer)
    if not isinstance(reducer, Mapping):
        raise InvalidExperimentException(
            f"evaluation_reducer() returned a {type(reducer).__name__}: expected a Reducer, or a dict of them by name"
        )
    if reducer.keys() != row.keys():
        raise InvalidExperimentException(
            f"evaluation_reducer() names {_names(reducer)}, but evaluate_batch() returned {_names(row)}"
        )
    for name, kind in reducer.items():
        if not isinstance(kind, Reducer):
            raise InvalidExperimentException(f"evaluation_reducer()[{name!r}] is {kind!r}: expected a Reducer")
    return {name: reducer[name] for name in row}


def _reduced(name: str, values: list[Any], kind: Reducer) -> Any:
    for value in values:
        if value is None or isinstance(value, str | bytes):
            raise TypeError(f"evaluate_batch() returned {value!r} for {name!r}: expected a number")
    try:
        stacked = np.stack([np.asarray(value) for value in values])
    except ValueError as e:
        raise ValueError(f"evaluate_batch() returned values of different shapes for {name!r}: {e}") from e
    if stacked.dtype.kind not in "biuf":
        raise TypeError(f"evaluate_batch() returned a {type(values[0]).__name__} for {name!r}: expected a number")
    return _plain(_REDUCE[kind](stacked))


def _plain(value: Any) -> Any:
    """Convert tensors to numpy arrays, and scalars to numbers."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def _names(row: Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(map(str, row))) + "}"
