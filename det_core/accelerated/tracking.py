"""History of the metrics of a run, and the running average of a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Any


class MetricNames(set[str]):
    """A set of names, iterated in the order of first recording.

    Args:
        names: names in that order.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        super().__init__(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), key=lambda name: self._places.get(name, len(self._places))))


class RunHistory(ABC):
    """Values of metrics, and the current epoch.

    Names in all reading methods include the prefix of the recording. Reading never changes the history.
    """

    @abstractmethod
    def get_metric_names(self) -> Set[str]:
        """Return the names of all metrics, in the order of first recording."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> list[Any]:
        """Return all values of a metric in order, or an empty list."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> Any:
        """Return the last value of a metric.

        Raises:
            ValueError: If the metric has no value.
        """

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: Any) -> None:
        """Record a value under the prefix and the name."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Delete a metric.

        Raises:
            KeyError: If the metric has no value.
        """

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Set the prefix of metrics recorded from now on."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """Prefix of metrics recorded now."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """Current epoch, from 1."""

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Advance to the next epoch."""

    @abstractmethod
    def _set_epoch(self, epoch: int) -> None:
        """Set the current epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Delete all metrics and return to epoch 1; keep the prefix."""


class InMemoryRunHistory(RunHistory):
    """A run history in the memory of this process."""

    def __init__(self) -> None:
        self._current_epoch = 1
        self._prefix = ""
        self._metrics: defaultdict[str, list[Any]] = defaultdict(list)

    def get_metric_names(self) -> MetricNames:
        return MetricNames(self._metrics)

    def get_metric_values(self, metric_name: str) -> list[Any]:
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
    """Average of a loss over records.

    Attributes:
        loss_value: last loss.
        total_loss: sum of losses, each times its number of records.
        running_count: number of records.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the average."""
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
        """Mean loss of a record, or 0 without records."""
        if not self.running_count:
            return 0.0
        return self.total_loss / self.running_count

    _average = average  # private name of pytorch-accelerated that scripts read
