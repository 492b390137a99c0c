"""One metrics row in the making, on the careful path: checked, made plain, compared with earlier ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from det_core.journal import _line
from det_core.journal._pending import PendingValue
from det_core.journal._plain import Plain, show
from det_core.journal._seen import BATCH, same, values_of

LOG = logging.getLogger("det_core")


def checked_group(group: Any) -> str:
    """``group``, if it can name a metric group."""
    if not isinstance(group, str):
        raise TypeError(f"group must be a str, not {type(group).__name__}: {group!r}")
    if not group or "." in group:
        raise ValueError(f"group {group!r} must be a non-empty name without '.'")
    try:
        group.encode()
    except UnicodeEncodeError:
        raise ValueError(f"group {group!r} has a lone surrogate, which JSON cannot hold") from None
    return str.__str__(group)


def checked_steps(steps: Any) -> int | None:
    """``steps`` as an int; None stays None."""
    number: int | None = steps
    if steps is not None and type(steps) is not int:
        try:
            number = None if isinstance(steps, bool) or _is_flag(steps) else index(steps)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(f"steps_completed must be an int, not {type(steps).__name__}: {steps!r}")
    if number is not None and not 0 <= number < 2**63:
        raise ValueError(f"steps_completed must be 0 or more and below 2**63, not {number}")
    return number


def _is_flag(steps: Any) -> bool:
    return "bool" in str(getattr(steps, "dtype", ""))


class Row:
    """The checked content of a report.

    Raises:
        TypeError, ValueError: the arguments cannot be stored; nothing is written.
    """

    def __init__(self, group: Any, steps: Any, metrics: Any, batch_metrics: Any) -> None:
        self.group = checked_group(group)
        self.steps = checked_steps(steps)
        self._plain = Plain()
        self.metrics = self._plain.mapping(metrics, ("metrics",))
        self.batch_metrics = None if batch_metrics is None else self._batches(batch_metrics)
        self.lost: list[str] = []
        if self.group == "validation":
            self._refuse_none()

    @property
    def pending(self) -> bool:
        """Whether values are still on their way from a device."""
        return bool(self._plain.pending)

    def keys(self) -> frozenset[str]:
        """The keys that the row gives values to."""
        return frozenset(self.metrics) | ({BATCH} if self.batch_metrics is not None else set())

    def settle(self) -> None:
        """Wait for the values that are pending. One that cannot be had is left out and named in ``lost``."""
        pending, self._plain.pending = self._plain.pending, []
        for container, key, value, path in pending:
            try:
                container[key] = self._plain.value(_wait(value), path)
            except Exception as e:
                LOG.warning("%s of group %s, step %s is lost: %s", show(path), self.group, self.steps, e)
                self.lost.append(show(path))
                _leave_out(container, key)

    def line(self, seq: int, now: float) -> bytes:
        """The row as a line of the journal."""
        record: dict[str, Any] = {
            "kind": "metrics",
            "seq": seq,
            "time": now,
            "group": self.group,
            "steps_completed": self.steps,
            "metrics": self.metrics,
        }
        if self.batch_metrics is not None:
            record["batch_metrics"] = self.batch_metrics
        if self.lost:
            record["lost"] = self.lost
        return _line.encode(record, self._plain.nonfinite)

    def values(self) -> dict[str, Any]:
        """What a reader will see, by key."""
        return values_of(_line.decode(self.line(0, 0.0)))

    def subtract(self, known: Mapping[str, Any]) -> None:
        """Take away what was reported before with the same value.

        Raises:
            ValueError: a key was reported before with another value.
        """
        values = self.values()
        for key in self.keys() & known.keys():
            if not same(values[key], known[key]):
                what = "batch_metrics" if key == BATCH else f"key {key!r}"
                raise ValueError(
                    f"group {self.group!r}, step {self.steps}, {what}: {known[key]!r} was reported before, and "
                    f"now {values[key]!r}; a value that was reported cannot be changed"
                )
            if key == BATCH:
                self.batch_metrics = None
            else:
                del self.metrics[key]
        gone = known.keys()
        self._plain.nonfinite = [
            p for p in self._plain.nonfinite if (BATCH if p[0] == "batch_metrics" else p[1]) not in gone
        ]

    def _batches(self, batches: Any) -> list[Any]:
        if not isinstance(batches, Sequence) or isinstance(batches, (str, bytes)):
            raise TypeError(f"batch_metrics must be a list of dicts, not {type(batches).__name__}")
        for number, batch in enumerate(batches):
            if not isinstance(batch, Mapping):
                raise TypeError(f"batch_metrics[{number}] must be a dict, not {type(batch).__name__}")
        return self._plain.sequence(batches, ("batch_metrics",))

    def _refuse_none(self) -> None:
        pending = {(p[0], p[1]) for *_, p in self._plain.pending if len(p) > 1}
        for key, value in self.metrics.items():
            if value is None and ("metrics", key) not in pending:
                raise ValueError(f"{show(('metrics', key))} is None: a validation metric needs a value")


def _wait(value: PendingValue) -> Any:
    return value.result()


def _leave_out(container: Any, key: str | int) -> None:
    if isinstance(container, dict):
        del container[key]
    else:
        container[key] = None


def settled(body: Any, kind: str) -> tuple[dict[str, Any], list[tuple[str | int, ...]]]:
    """A record's body as plain values, and the paths of its non-finite numbers from the top of the record."""
    plain = Plain()
    values = plain.mapping(body, (kind,))
    for container, key, value, path in plain.pending:
        container[key] = plain.value(value.result(), path)
    return values, [("body", *path[1:]) for path in plain.nonfinite]
