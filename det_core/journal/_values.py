"""Convert reported values to JSON.

The accepted types are those of the wire contract's encoder (§2.1): numbers, strings, None, lists and dicts, numpy and
torch scalars and arrays, bytes that are UTF-8, dates, UUIDs, enums (by value) and objects with ``__json__``. Rows of
plain JSON do not pass through here, see :meth:`Journal.metrics`.

Tensors on a CUDA device are copied by :mod:`det_core.journal._devices`: a report does not wait for a device, except for
up to 10 s when the value of a step is reported again. The row is written once the copies have arrived.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from datetime import time as time_of_day
from enum import Enum
from itertools import repeat
from math import isfinite, prod
from operator import index
from typing import Any
from uuid import UUID

from det_core._json import encode_nonfinite, equal_json
from det_core.journal._devices import BUFFER_TYPES, DeviceCopy, HostBuffers, PendingValue, is_ready

logger = logging.getLogger("det_core")

Path = tuple[str | int, ...]
"""Keys and indices that lead to a value, after the name of the argument."""

MAX_DEPTH = 200
"""Levels of nesting; orjson itself stops at 254."""
MAX_ELEMENTS = 10_000
"""Elements of a tensor or an array; each becomes a number in the journal, and millions of them take minutes."""
GROUPS_WITH_STEPS = ("training", "validation")
"""Groups whose rows must have a step; those of system metrics, such as ``gpu``, have none."""
BATCHES = "batch_metrics"
TORCH = ("torch", "torch.nn.parameter")
"""Modules of torch's own tensors; other subclasses may hold several memories, or none."""


class NotPlain(TypeError):
    """A value that :func:`read_numbers` leaves to the slow path."""


def read_numbers(value: Any) -> Any:
    """Return the numbers of a tensor in host memory, or of a numpy array or scalar.

    This is orjson's ``default``: a row of such values costs a report no more than one of Python's numbers.

    Raises:
        NotPlain: If the value is anything else.
    """
    try:
        module = type(value).__module__
        if (module in TORCH and not value.is_cuda) or (module == "numpy" and value.dtype.kind in "biuf"):
            if not value.shape:
                return value.item()
            if prod(value.shape) <= MAX_ELEMENTS:
                return value.tolist()
    except (AttributeError, RuntimeError) as e:  # another class of these modules, or a tensor without data
        raise NotPlain from e
    raise NotPlain


class Report:
    """The validated content of a metrics row.

    Args:
        group, steps, metrics, batch_metrics: as passed to :meth:`Journal.metrics`.
        buffers: memory for values that come from a device.

    Attributes:
        lost: paths of values that never arrived from their device.

    Raises:
        TypeError, ValueError: If the arguments cannot be stored.
    """

    def __init__(self, group: Any, steps: Any, metrics: Any, batch_metrics: Any, buffers: HostBuffers) -> None:
        self.group = _checked_group(group)
        self.steps = _checked_steps(steps, self.group)
        self._converter = _JsonConverter(buffers)
        self.metrics = self._converter.mapping(metrics, ("metrics",))
        self.batch_metrics = None if batch_metrics is None else self._batches(batch_metrics)
        self.lost: list[str] = []
        if self.group == "validation":
            self._refuse_none()
        for value in self.pending:
            if isinstance(value, DeviceCopy):
                value.start()

    @property
    def pending(self) -> list[PendingValue]:
        """Values in flight from a device."""
        return list(self._converter.pending)

    @property
    def ready(self) -> bool:
        """Whether :meth:`resolve_pending` returns without waiting."""
        return all(map(is_ready, self._converter.pending))

    def keys(self) -> set[str]:
        """Return the keys of its metrics; :data:`BATCH_METRICS` is the key of batch metrics."""
        from det_core.journal._format import BATCH_METRICS

        keys = set(self.metrics)
        if self.batch_metrics is not None:
            keys.add(BATCH_METRICS)
        return keys

    def resolve_pending(self) -> None:
        """Insert the values that were pending. One that has not arrived is removed, and named in ``lost``."""
        pending = self._converter.pending
        self._converter.pending = {}
        for value, places in pending.items():
            try:
                if not is_ready(value):
                    raise TimeoutError("it has not arrived from its device")
                result = value.result()
            except Exception as e:  # whatever the device raises, the rest of the row is worth keeping
                for place in places:
                    self._lose(place, e)
                continue
            items = result if isinstance(value, DeviceCopy) else repeat(result)  # one value may have several places
            for place, item in zip(places, items, strict=False):
                container, key, path = place
                try:
                    container[key] = self._converter.value(item, path)
                except Exception as e:
                    self._lose(place, e)

    def line(self, seq: int, now: float) -> bytes:
        """Return the row as a line of the journal."""
        from det_core.journal._format import encode

        record: dict[str, Any] = {
            "kind": "metrics",
            "seq": seq,
            "time": now,
            "group": self.group,
            "steps_completed": self.steps,
            "metrics": self.metrics,
        }
        if self.batch_metrics is not None:
            record[BATCHES] = self.batch_metrics
        if self.lost:
            record["lost"] = self.lost
        return encode(record, self._converter.nonfinite)

    def drop_repeated(self, known: Mapping[str, Any]) -> None:
        """Remove values that were reported before. Pending values are not compared.

        Raises:
            ValueError: If a key was reported before with another value.
        """
        from det_core.journal._format import BATCH_METRICS, decode, values_by_key

        record = decode(self.line(0, 0.0))
        assert record is not None
        values = values_by_key(record)
        unknown = {_key_of(path) for path in self._converter.pending_paths()}
        repeated = [key for key in values if key in known and key not in unknown]
        # All are compared before the first is removed: a rejected report must stay as it was given.
        for key in repeated:
            if not equal_json(values[key], known[key]):
                what = BATCHES if key == BATCH_METRICS else f"key {key!r}"
                raise ValueError(
                    f"group {self.group!r}, step {self.steps}, {what} changed from {known[key]!r} to {values[key]!r}: "
                    "reported values are immutable; report the mean or the list of a step's values, or draw them by "
                    "ctx.train.write_scalars()"
                )
        for key in repeated:
            if key == BATCH_METRICS:
                self.batch_metrics = None
            else:
                del self.metrics[key]
        self._converter.nonfinite = [p for p in self._converter.nonfinite if _key_of(p) not in repeated]

    def _batches(self, batches: Any) -> list[Any]:
        if not isinstance(batches, Sequence) or isinstance(batches, (str, bytes)):
            raise TypeError(f"batch_metrics must be a list of dicts, not {type(batches).__name__}")
        for number, batch in enumerate(batches):
            if not isinstance(batch, Mapping):
                raise TypeError(f"batch_metrics[{number}] must be a dict, not {type(batch).__name__}")
        return self._converter.sequence(batches, (BATCHES,))

    def _refuse_none(self) -> None:
        pending = set(self._converter.pending_paths())
        for key, value in self.metrics.items():
            if value is None and ("metrics", key) not in pending:
                raise ValueError(f"{format_path(('metrics', key))} is None: validation metrics must have a value")

    def _lose(self, place: _Place, error: Exception) -> None:
        container, key, path = place
        logger.warning("lost %s of group %s, step %s: %s", format_path(path), self.group, self.steps, error)
        self.lost.append(format_path(path))
        if isinstance(container, dict):  # in a list None keeps its place
            del container[key]


def _key_of(path: Path) -> str | int:
    """Return the key of a row's values that a path leads into."""
    if path[0] == BATCHES:
        from det_core.journal._format import BATCH_METRICS

        return BATCH_METRICS
    return path[1]


def to_json_dict(value: Any, path: Path = ()) -> tuple[dict[str, Any], list[Path]]:
    """Return a dict as it is stored in a line, and the paths of its numbers that are not finite.

    Args:
        value: a mapping without values on a device.
        path: its place in the line.

    Raises:
        TypeError, ValueError: If JSON cannot hold it; the message has the path.
    """
    content = _JsonConverter(HostBuffers())
    values = content.mapping(value, path)
    for pending in content.pending_paths():
        raise TypeError(f"{format_path(pending)} is on a device: report it as a metric, or pass its value")
    return values, content.nonfinite


def format_path(path: Path) -> str:
    """Return a path as an expression: ``metrics["a"][3]``."""
    head, *rest = path
    text = str(head) + "".join(f"[{part}]" if isinstance(part, int) else f'["{part}"]' for part in rest)
    return text.encode(errors="backslashreplace").decode()


_Place = tuple[Any, str | int, Path]
"""Place of a pending value: container and key, and the path to it."""


class _JsonConverter:
    """Converter of values to plain JSON.

    Args:
        buffers: memory for values that come from a device.

    Attributes:
        nonfinite: paths of numbers that are stored as strings.
        pending: values in flight from a device, with their places, which hold None meanwhile.
    """

    def __init__(self, buffers: HostBuffers) -> None:
        self.nonfinite: list[Path] = []
        self.pending: dict[PendingValue, list[_Place]] = {}
        self._buffers = buffers
        self._copies: dict[tuple[Any, Any], DeviceCopy] = {}
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type = getattr(self._torch, "Tensor", None)

    def pending_paths(self) -> Iterator[Path]:
        """Yield the paths of values in flight."""
        return (path for places in self.pending.values() for _, _, path in places)

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        """Return a dict of plain values with str keys.

        Args:
            value: a mapping.
            path: its place.

        Raises:
            TypeError: If a value in it has a type that JSON cannot hold; the message has the path.
            ValueError: If JSON cannot hold a value: too large, not UTF-8, or nested too deep.
        """
        if not isinstance(value, Mapping):
            raise TypeError(f"{format_path(path)} must be a dict, not {_with_article(value)}")
        _check_depth(path)
        plain: dict[str, Any] = {}
        for key, item in list(value.items()):
            name = key if type(key) is str and key.isascii() else self._key(key, path)
            if name in plain:
                raise ValueError(f"{format_path(path)} has two keys that are {name!r} in JSON")
            if type(item) is float and isfinite(item):  # nearly all are, and a row may have 100,000
                plain[name] = item
                continue
            plain[name] = None  # a pending value keeps its place among the keys
            plain[name] = self._item(plain, name, item, path)
        return plain

    def sequence(self, value: Sequence[Any], path: Path) -> list[Any]:
        """Return a list of plain values; see :meth:`mapping`."""
        _check_depth(path)
        plain: list[Any] = []
        for number, item in enumerate(list(value)):
            plain.append(self._item(plain, number, item, path))
        return plain

    def value(self, value: Any, path: Path) -> Any:
        """Return one plain value, or a pending one; see :meth:`mapping`."""
        if type(value) is float and isfinite(value):  # first, as a list may have hundreds
            return value
        if type(value) is self._tensor_type:
            return self._tensor(value, path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return self.value(value.value, path)
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise ValueError(
                    f"{format_path(path)}: the integer {str(int(value))[:24]}… is beyond 64 bits; report it as a float"
                )
            return int(value)
        if isinstance(value, float):
            return self._float(float(value), path)
        if isinstance(value, str):
            return _text(str.__str__(value), path)
        if _is_array(value):  # numpy's scalars, too
            return self._array(value, path)
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, (list, tuple)):
            return self.sequence(value, path)
        return self._other(value, path)

    def _item(self, container: Any, key: str | int, item: Any, path: Path) -> Any:
        here = (*path, key)
        plain = self.value(item, here)
        if type(plain) is DeviceCopy or isinstance(plain, PendingValue):  # an ABC's answer takes half a microsecond
            self.pending.setdefault(plain, []).append((container, key, here))
            return None
        return plain

    def _key(self, key: Any, path: Path) -> str:
        if isinstance(key, str):
            return _text(str.__str__(key), (*path, key))
        if isinstance(key, bool) or not hasattr(key, "__index__"):
            raise TypeError(f"{format_path(path)} has the key {key!r}, {_with_article(key)}: keys must be str")
        return str(int(key))

    def _float(self, value: float, path: Path) -> float | str:
        if isfinite(value):
            return value
        self.nonfinite.append(path)
        return encode_nonfinite(value)

    def _other(self, value: Any, path: Path) -> Any:
        if isinstance(value, PendingValue):
            return value
        if hasattr(value, "__json__"):
            return self.value(value.__json__(), path)
        if isinstance(value, (bytes, bytearray)):
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                raise ValueError(
                    f"{format_path(path)}: these bytes are not UTF-8 text, which JSON cannot hold"
                ) from None
        if isinstance(value, (datetime, date, time_of_day)):
            return value.isoformat()
        if isinstance(value, UUID):
            return str(value)
        raise TypeError(f"{format_path(path)}: {_with_article(value)} cannot be stored as JSON")

    def _array(self, value: Any, path: Path) -> Any:
        if self._tensor_type is not None and isinstance(value, self._tensor_type):
            return self._tensor(value, path)
        if not hasattr(value, "tolist"):  # TensorFlow's
            value = value.numpy()
        _check_size(value, path)
        kind = value.dtype.kind
        if (kind == "f" and value.dtype.itemsize > 8) or (kind == "V" and value.dtype.names is None):
            value = value.astype("float64")  # a long double; bfloat16 and its like
        elif kind not in "biufU":
            raise TypeError(f"{format_path(path)}: {_with_article(value)} of {value.dtype} cannot be stored as JSON")
        return self.value(value.tolist(), path)

    def _tensor(self, value: Any, path: Path) -> Any:
        key = value.device, value.dtype
        copy = self._copies.get(key)
        # A second number of the same device and dtype needs no further checks, each of which costs a call to torch.
        if (
            copy is None
            or value.ndim
            or value.layout is not self._torch.strided
            or type(value) is not self._tensor_type
        ):
            _check_size(value, path)
            is_dense = value.layout is self._torch.strided
            if not is_dense or value.dtype.is_complex or value.is_quantized or value.is_meta:
                kind = "meta"
                if not value.is_meta:
                    kind = str(value.dtype) if is_dense else "sparse"
                raise TypeError(f"{format_path(path)}: a {kind} tensor cannot be stored as JSON")
            # Only torch's own classes: a DTensor or the like has its own way to become a list.
            if type(value).__module__ not in TORCH or value.device.type not in BUFFER_TYPES:
                return self.value(value.tolist(), path)
            if copy is None:
                copy = self._copies[key] = DeviceCopy(self._buffers, *key)
        copy.tensors.append(value)
        return copy


def _checked_group(group: Any) -> str:
    """Return ``group`` if it can name a metric group."""
    if not isinstance(group, str):
        raise TypeError(f"group must be a str, not {type(group).__name__}: {group!r}")
    if not group or "." in group:
        raise ValueError(f"group {group!r} must be a non-empty name without '.'")
    try:
        group.encode()
    except UnicodeEncodeError:
        raise ValueError(f"group {group!r} has a lone surrogate, which JSON cannot hold") from None
    return str.__str__(group)


def _checked_steps(steps: Any, group: str) -> int | None:
    """Return ``steps`` as an int, or None if the group's rows may have none."""
    if steps is None and group not in GROUPS_WITH_STEPS:
        return None
    try:
        # numpy and torch booleans have an __index__, too.
        is_flag = isinstance(steps, bool) or "bool" in str(getattr(steps, "dtype", ""))
        number = None if is_flag else index(steps)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"steps_completed must be an int, not {type(steps).__name__}: {steps!r}")
    if not 0 <= number < 2**63:
        raise ValueError(f"steps_completed must be 0 or more and below 2**63, not {number}")
    return number


def _is_array(value: Any) -> bool:
    has_array_fields = hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    return has_array_fields and not hasattr(value, "__json__")


def _check_depth(path: Path) -> None:
    """Raise ValueError for a value that is nested too deep, such as one that contains itself."""
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{format_path(path[:4])}… is nested deeper than {MAX_DEPTH} levels")


def _check_size(value: Any, path: Path) -> None:
    if (size := prod(value.shape)) > MAX_ELEMENTS:
        raise ValueError(
            f"{format_path(path)} is {_with_article(value)} of {size:,} elements, and a metric has "
            f"{MAX_ELEMENTS:,} at most: report a number of it, such as its mean, and save the whole in a checkpoint or "
            "a file"
        )


def _text(value: str, path: Path) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{format_path(path)}: a string with a lone surrogate cannot be stored as JSON") from None
    return value


def _with_article(value: Any) -> str:
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return f"{article} {name}"
