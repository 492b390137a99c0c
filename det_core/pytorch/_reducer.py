"""From the metrics of batches to one number for each name: averages, the built-in reducers, and users' own."""

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
    """How validation metrics of batches become one number. Scripts use the numbers, too."""

    AVG = 1
    """The mean over batches; over ranks it is weighted by their numbers of batches, not of records."""
    SUM = 2
    MAX = 3
    MIN = 4


_REDUCE: dict[Reducer, Callable[[Any], Any]] = {
    Reducer.AVG: np.mean, Reducer.SUM: np.sum, Reducer.MAX: np.max, Reducer.MIN: np.min,
}  # fmt: skip


class MetricReducer(abc.ABC):
    """A metric of your own over batches and ranks, made known by ``context.wrap_reducer()``.

    Feed it from ``train_batch`` or ``evaluate_batch`` by a method of your own, such as ``update(value)``.
    """

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin anew; called before each training workload and each validation."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """What this rank contributes; called on every rank at the end. It is pickled."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: Sequence[Any]) -> Any:
        """The result; called on every rank.

        Args:
            per_slot_metrics: what :meth:`per_slot_reduce` returned on each rank, in the order of ranks.

        Returns:
            the value of the metric; or a dictionary of metrics, if the reducer was wrapped without a name.
        """


class _FunctionReducer(MetricReducer):
    """A function over the values of all ranks, in the order of the data where there is one a batch."""

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
        dealt = chain.from_iterable(zip_longest(*per_slot_metrics, fillvalue=missing))
        return self._function([value for value in dealt if value is not missing])


@dataclass(frozen=True)
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool
    kind: str

    def serves(self, training: bool) -> bool:
        return self.for_training if training else self.for_validation

    def __str__(self) -> str:
        return f"reducer {self.kind}" + (f" of metric {self.name!r}" if self.name else "")


class Reducers:
    """The reducers of one context, in the order in which they were wrapped; all ranks must wrap the same ones."""

    def __init__(self) -> None:
        self._all: list[_Wrapped] = []

    def wrap(
        self, reducer: Any, name: str | None, *, for_training: bool = True, for_validation: bool = True
    ) -> MetricReducer:
        """Add one; see ``PyTorchTrialContext.wrap_reducer()``."""
        kind = getattr(reducer, "__name__", type(reducer).__name__)
        assert isinstance(reducer, MetricReducer) or callable(reducer), (
            f"wrap_reducer() takes a MetricReducer or a function, not a {type(reducer).__name__}"
        )
        assert all(reducer is not known.reducer for known in self._all), f"{kind} was wrapped before"
        made = reducer if isinstance(reducer, MetricReducer) else _FunctionReducer(reducer)
        self._all.append(_Wrapped(made, name, for_training, for_validation, kind))
        return made

    def any(self, *, training: bool) -> bool:
        """Whether there are any for training, or for validation."""
        return any(wrapped.serves(training) for wrapped in self._all)

    def signature(self) -> list[tuple[str, str | None, bool, bool]]:
        """What must be equal on all ranks."""
        return [(w.kind, w.name, w.for_training, w.for_validation) for w in self._all]

    def reset(self) -> None:
        """Have all of them begin anew."""
        for wrapped in self._all:
            _calling(wrapped, wrapped.reducer.reset)

    def slots(self, *, training: bool) -> list[Any]:
        """What this rank contributes to each."""
        return [_calling(w, w.reducer.per_slot_reduce) for w in self._all if w.serves(training)]

    def reduce(self, gathered: Sequence[Sequence[Any]], *, training: bool) -> Row:
        """The metrics; of equal names the later reducer's counts.

        Args:
            gathered: what :meth:`slots` returned on each rank.
            training: as there.
        """
        found: Row = {}
        serving = [wrapped for wrapped in self._all if wrapped.serves(training)]
        for wrapped, per_rank in zip(serving, zip(*gathered, strict=True) if serving else (), strict=True):
            value = _calling(wrapped, wrapped.reducer.cross_slot_reduce, per_rank)
            if wrapped.name is None:
                assert isinstance(value, dict), f"{wrapped} returned a {type(value).__name__}: without a name=, a dict"
                found.update({name: _plain(each) for name, each in value.items()})
            else:
                assert not isinstance(value, dict), f"{wrapped} returned a dict: wrap it without a name="
                found[wrapped.name] = _plain(value)
        return found


def _calling(wrapped: _Wrapped, method: Callable[..., Any], *args: Any) -> Any:
    try:
        return method(*args)
    except Exception as e:
        raise ValueError(f"{wrapped}: {method.__name__}() raised {type(e).__name__}: {e}") from e


# training


def check_names(rows: Sequence[Row], method: str, first: int = 0, rows_per_batch: int = 1) -> None:
    """Raise ValueError unless all rows, which ``method`` has returned from batch ``first`` on, have the same names."""
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"{method}() returned the metrics {_names(row)} for batch {first + number // rows_per_batch}, and "
                f"{_names(rows[0])} before: it must return the same names for every batch"
            )


def _check_ranks(rows: Sequence[Row | None], method: str) -> None:
    """The same for one row of each rank; None: it reports nothing."""
    first, *others = [(rank, row) for rank, row in enumerate(rows) if row is not None] or [(0, {})]
    for rank, row in others:
        if row.keys() != first[1].keys():
            raise ValueError(
                f"{method}() returned the metrics {_names(row)} on rank {rank}, and {_names(first[1])} on rank "
                f"{first[0]}: it must return the same names on every rank"
            )


def training_results(per_rank: Sequence[Sequence[Row]]) -> tuple[Row, list[Row]]:
    """The averages of a workload, and the rows of its batches.

    Args:
        per_rank: the rows of each rank, one a batch, as many on each; none of one that does not report.

    Returns:
        per name the mean over batches; and per batch the mean over ranks. None does not count; values that have no
        mean, such as text, give None. Arrays of equal shapes are averaged element by element.

    Raises:
        ValueError: ranks have returned different names.
    """
    reporting = [rows for rows in per_rank if rows]
    _check_ranks([rows[0] if rows else None for rows in per_rank], "train_batch")
    rows = reporting[0] if reporting else []
    if len(reporting) > 1:
        together = zip(*reporting, strict=True)
        rows = [{name: _mean([row[name] for row in same]) for name in same[0]} for same in together]
    return {name: _mean([row[name] for row in rows]) for name in (rows[0] if rows else ())}, list(rows)


def _mean(values: list[Any]) -> Any:
    if {float}.issuperset(map(type, values)):
        return sum(values) / len(values)
    numbers = [value for value in values if value is not None]
    if not numbers or any(isinstance(value, str | bytes) for value in numbers):
        return None
    try:
        mean = np.mean(np.asarray(numbers), axis=0)
    except (TypeError, ValueError):  # ragged, or no numbers at all
        return None
    return mean.item() if mean.ndim == 0 else mean


# validation


def local_results(rows: Sequence[Row], reducer: Any) -> tuple[Row, int]:
    """What the batches of one rank come to, with their number.

    Args:
        rows: one a batch; none at all is fine.
        reducer: one for all names, or by name.

    Raises:
        ValueError: batches with different names, or with values of different shapes under one.
        TypeError: a value that is no number.
        InvalidExperimentException: the reducers by name are not those of the metrics.
    """
    if not rows:
        return {}, 0
    check_names(rows, "evaluate_batch")
    kinds = _by_name(reducer, rows[0])
    return {name: _reduced(name, [row[name] for row in rows], kinds[name]) for name in rows[0]}, len(rows)


def evaluation_results(per_rank: Sequence[tuple[Row, int]], reducer: Any) -> Row:
    """The metrics of a validation.

    Args:
        per_rank: what :func:`local_results` returned on each rank.
        reducer: as there.

    Raises:
        RuntimeError: no rank has a batch.
        ValueError: ranks have returned different names.
    """
    having = [(row, weight) for row, weight in per_rank if weight]
    if not having:
        raise RuntimeError("the validation loader gives no batch on any rank")
    _check_ranks([row if weight else None for row, weight in per_rank], "evaluate_batch")
    weights = [weight for _, weight in having]
    kinds = _by_name(reducer, having[0][0])
    found: Row = {}
    for name, kind in kinds.items():
        values = [row[name] for row, _ in having]
        found[name] = (
            float(np.average(values, weights=weights)) if kind is Reducer.AVG else _plain(_REDUCE[kind](values))
        )
    return found


def _by_name(reducer: Any, row: Row) -> dict[str, Reducer]:
    """The reducer of each name."""
    if isinstance(reducer, Reducer):
        return dict.fromkeys(row, reducer)
    if not isinstance(reducer, Mapping):
        raise InvalidExperimentException(
            f"evaluation_reducer() returned a {type(reducer).__name__}: expected a Reducer, or a dict of them by name"
        )
    if reducer.keys() != row.keys():
        raise InvalidExperimentException(
            f"evaluation_reducer() names {_names(reducer)}, and evaluate_batch() returned {_names(row)}"
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
    """numpy in place of tensors, numbers in place of scalars."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def _names(row: Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(map(str, row))) + "}"
