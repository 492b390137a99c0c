"""Column types: JSON that keeps every float, text that any database takes, numbers of 64 bits, times."""

from __future__ import annotations

import json
from typing import Any

import orjson
from sqlalchemy import BigInteger, Dialect, Double, Integer, Text
from sqlalchemy.types import TypeDecorator

Int = BigInteger
"""64 bits."""
Serial = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits, counted up by the database where no value is given."""
Time = Double
"""Seconds since the epoch."""


def dumps(value: Any) -> str:
    """``value`` as JSON; numbers that are not finite as ``NaN``, ``Infinity`` and ``-Infinity`` without quotes."""
    return json.dumps(value, separators=(",", ":"))


def loads(text: str) -> Any:
    """What :func:`dumps` or orjson has written."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


class Json(TypeDecorator[Any]):
    """Any plain value, as JSON text; None is NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else loads(value)


class Words(TypeDecorator[str]):
    """Text that people or programs wrote; what databases cannot hold (NUL, half a surrogate pair) becomes U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
