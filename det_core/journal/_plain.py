"""From what a script reports to what JSON holds: the careful path, for all that is not plain already.

What is taken is what the wire contract's encoder takes (§2.1): numbers, strings, None, lists and dicts, numpy
and torch scalars and arrays, bytes that are UTF-8, dates, UUIDs, enums (by value) and objects with
``__json__``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from math import isfinite, prod
from typing import Any
from uuid import UUID

from det_core._json import word
from det_core.journal._pending import LostValue, PendingValue

Path = tuple[str | int, ...]

MAX_DEPTH = 200
"""Levels of nesting; orjson itself stops at 254."""
LARGEST = 10_000
"""Elements of a tensor or an array; each is a number in the journal, which takes minutes for millions of them."""


class Plain:
    """Turns one report into plain values; ``nonfinite`` and ``pending`` then say what is special in it."""

    def __init__(self) -> None:
        self.nonfinite: list[Path] = []
        self.pending: list[tuple[Any, str | int, PendingValue, Path]] = []
        self._open: set[int] = set()

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        """A dict of plain values with str keys.

        Args:
            value: what was given.
            path: where it stands; the first segment is the argument's name.

        Raises:
            TypeError: something in it has a type that JSON cannot hold; the message gives the path.
            ValueError: a value that JSON cannot hold (too large, not UTF-8, containing itself).
        """
        if not isinstance(value, Mapping):
            raise TypeError(f"{show(path)} must be a dict, not {_a(value)}")
        self._enter(value, path)
        plain: dict[str, Any] = {}
        for key, item in list(value.items()):
            name = self._key(key, path)
            if name in plain:
                raise ValueError(f"{show(path)} has two keys that are {name!r} in JSON")
            plain[name] = None
            plain[name] = self._item(plain, name, item, path)
        self._open.discard(id(value))
        return plain

    def sequence(self, value: Sequence[Any], path: Path) -> list[Any]:
        """A list of plain values; see :meth:`mapping`."""
        self._enter(value, path)
        plain: list[Any] = []
        for index, item in enumerate(list(value)):
            plain.append(None)
            plain[index] = self._item(plain, index, item, path)
        self._open.discard(id(value))
        return plain

    def value(self, value: Any, path: Path) -> Any:
        """One plain value; see :meth:`mapping`."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return self.value(value.value, path)
        if isinstance(value, int):
            return self._int(int(value), path)
        if isinstance(value, float):
            return self._float(float(value), path)
        if isinstance(value, str):
            return _text(str.__str__(value), path)
        if isinstance(value, Mapping):
            return self.mapping(value, path)
        if isinstance(value, (list, tuple)):
            return self.sequence(value, path)
        return self._other(value, path)

    def _item(self, container: Any, key: str | int, item: Any, path: Path) -> Any:
        here = (*path, key)
        if is_cuda(item):
            item = _on_its_way(_checked_tensor(item, here))
        if isinstance(item, PendingValue):
            self.pending.append((container, key, item, here))
            return None
        return self.value(item, here)

    def _enter(self, value: Any, path: Path) -> None:
        if id(value) in self._open:
            raise ValueError(f"{show(path)} contains itself, which JSON cannot hold")
        if len(path) > MAX_DEPTH:
            raise ValueError(f"{show(path[:4])}… is nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))

    def _key(self, key: Any, path: Path) -> str:
        if isinstance(key, str):
            return _text(str.__str__(key), (*path, key))
        if isinstance(key, bool) or not hasattr(key, "__index__"):
            raise TypeError(f"a key of {show(path)} is {key!r}, {_a(key)}: keys must be str")
        return str(int(key))

    def _int(self, value: int, path: Path) -> int:
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{show(path)}: the integer {str(value)[:24]}… is beyond 64 bits; report it as a float")
        return value

    def _float(self, value: float, path: Path) -> float | str:
        if isfinite(value):
            return value
        self.nonfinite.append(path)
        return word(value)

    def _other(self, value: Any, path: Path) -> Any:
        if hasattr(value, "__json__"):
            return self.value(value.__json__(), path)
        if isinstance(value, (bytes, bytearray)):
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                raise ValueError(f"{show(path)}: these bytes are not UTF-8 text, which JSON cannot hold") from None
        if isinstance(value, (datetime, date, time)):
            return value.isoformat()
        if isinstance(value, UUID):
            return str(value)
        if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
            return self._array(value, path)
        raise TypeError(f"{show(path)}: {_a(value)} cannot be stored as JSON")

    def _array(self, value: Any, path: Path) -> Any:
        tensor = _torch_tensor()
        if tensor is not None and isinstance(value, tensor):
            return self.value(_checked_tensor(value, path).detach().tolist(), path)
        if not hasattr(value, "tolist"):  # TensorFlow's
            value = value.numpy()
        _check_size(value, path)
        kind = value.dtype.kind
        if (kind == "f" and value.dtype.itemsize > 8) or (kind == "V" and value.dtype.names is None):
            value = value.astype("float64")  # a long double; bfloat16 and its like
        elif kind not in "biufU":
            raise TypeError(f"{show(path)}: {_a(value)} of {value.dtype} cannot be stored as JSON")
        return self.value(value.tolist(), path)


def show(path: Path) -> str:
    """A path as the expression a person would write: ``metrics["a"][3]``."""
    head, *rest = path
    text = str(head) + "".join(f"[{part}]" if isinstance(part, int) else f'["{part}"]' for part in rest)
    return text.encode(errors="backslashreplace").decode()


def is_cuda(value: Any) -> bool:
    """Whether ``value`` is a plain torch tensor on a CUDA (or ROCm) device."""
    tensor = _torch_tensor()
    if tensor is None or not isinstance(value, tensor) or not value.is_cuda:
        return False
    return type(value).__module__ in ("torch", "torch.nn.parameter")  # not a DTensor or its like


def _on_its_way(tensor: Any) -> PendingValue:
    from det_core.journal._cuda import CudaCopy

    try:
        return CudaCopy(tensor)
    except Exception as e:  # the device is dead: a report does not raise, its row says what is lost
        return LostValue(e)


def _torch_tensor() -> Any:
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _check_size(value: Any, path: Path) -> None:
    if (size := prod(value.shape)) > LARGEST:
        raise ValueError(
            f"{show(path)} is {_a(value)} of {size:,} elements, and a metric has {LARGEST:,} at most: report a number "
            "of it, such as its mean, and save the whole in a checkpoint or a file"
        )


def _checked_tensor(value: Any, path: Path) -> Any:
    _check_size(value, path)
    if value.dtype.is_complex or value.is_sparse or value.is_quantized or value.is_meta:
        kind = "meta" if value.is_meta else "sparse" if value.is_sparse else str(value.dtype)
        raise TypeError(f"{show(path)}: a {kind} tensor cannot be stored as JSON")
    return value


def _text(value: str, path: Path) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{show(path)}: a string with a lone surrogate cannot be stored as JSON") from None
    return value


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
