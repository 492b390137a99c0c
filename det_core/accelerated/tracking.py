"""The metrics of a run, value after value, and the running average of a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Any


class MetricNames(set[str]):
    """A set of names that gives them in the order in which they were first recorded.

    Args:
        names: in that order.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        super().__init__(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), key=lambda name: self._places.get(name, len(self._places))))


class RunHistory(ABC):
    """Keeps the values of metrics and counts epochs. Reads change nothing, and give metrics their full names, with the
    prefix that they were recorded under."""

    @abstractmethod
    def get_metric_names(self) -> Set[str]:
        """The names of all metrics, in the order in which they were first recorded."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> list[Any]:
        """All values of a metric in order; none, if nothing was recorded."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """The last value of a metric.

        Raises:
            ValueError: nothing was recorded.
        """

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Record a value, under the prefix and the name."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Forget a metric.

        Raises:
            KeyError: there is none of that name.
        """

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Say what the names of metrics recorded from now on begin with."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """What names of metrics begin with now."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The epoch, from 1."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Go on to the next epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to epoch 1 and forget all metrics; the prefix stays."""


class InMemoryRunHistory(RunHistory):
    """A run history in the memory of this process."""

    def __init__(self) -> None:
        self._current_epoch = 1
        self._prefix = ""
        self._metrics: defaultdict[str, list[Any]] = defaultdict(list)

    def get_metric_names(self) -> MetricNames:
        """A copy, in order."""
        return MetricNames(self._metrics)

    def get_metric_values(self, metric_name: str) -> list[Any]:
        """A copy."""
        return list(self._metrics.get(metric_name, ()))

    def get_latest_metric(self, metric_name: str) -> Any:
        if not self._metrics.get(metric_name):
            raise ValueError(f"No values have been recorded for the metric {metric_name}")
        return self._metrics[metric_name][-1]

    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        self._metrics[f"{self._prefix}{metric_name}"].append(metric_value)

    def delete_metric(self, metric_name: str) -> None:
        del self._metrics[metric_name]

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        self._prefix = prefix

    @property
    def metric_name_prefix(self) -> str:
        return self._prefix

    @property
    def current_epoch(self) -> int:
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def reset(self) -> None:
        self._current_epoch = 1
        self._metrics.clear()


class LossTracker:
    """Averages a loss over records.

    Attributes:
        loss_value: the last loss.
        total_loss: the sum of losses, each times its number of records.
        running_count: how many records there were.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.loss_value = 0.0
        self.total_loss = 0.0
        self.running_count = 0

    def update(self, loss_batch_value: float, batch_size: int = 1) -> None:
        """Add the mean loss of a batch of ``batch_size`` records."""
        self.loss_value = loss_batch_value
        self.total_loss += loss_batch_value * batch_size
        self.running_count += batch_size

    @property
    def average(self) -> float:
        """The mean loss of a record; 0 where there was none."""
        return self.total_loss / self.running_count if self.running_count else 0.0

    _average = average  # the original's, which people read
