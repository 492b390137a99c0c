"""Values of requests and answers: the wire contract's JSON (§2.1, §2.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, TypeVar

import fastapi
from fastapi import Path, Query
from fastapi.responses import Response
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from det_core._json import dump

T = TypeVar("T")
USER = "determined"
"""Name of the one user, which the contract's clients expect."""
INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_ROWS = 2000
"""Maximum number of rows in an answer."""
NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}
"""Description of the answers of routes that send lines."""
_FLOATS = {"nan": "nan", "infinity": "inf", "-infinity": "-inf"}
_DATETIME = TypeAdapter(datetime)


class Body(BaseModel):
    """Object in a request: camelCase or snake_case, unknown fields ignored, ``null`` as if it were absent."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


IN_BODY = fastapi.Body(embed=True)
"""Marks a parameter of a route as a field of the request's body."""


def _number(value: Any) -> Any:
    return _FLOATS.get(value.lower(), value) if isinstance(value, str) else value


def _integer(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise ValueError("expected an integer, found a boolean")
    return value


def _seconds(value: Any) -> float:
    try:
        moment = _DATETIME.validate_python(value)
    except ValidationError:
        raise ValueError("expected a time as in RFC 3339, such as 2024-01-31T12:00:00Z") from None
    # Python takes a time without a zone for local time.
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


Number = Annotated[float, BeforeValidator(_number)]
"""A float; also the strings for those that are not finite, in either of their spellings."""
Int64 = Annotated[int, Field(ge=-INT64 - 1, le=INT64)]
"""A 64-bit integer, as a number or in decimal digits."""
Size = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=INT64)]
"""A 64-bit count, as a number or in decimal digits."""
Id = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=INT32)]
"""The number of an experiment, trial or storage."""
Timestamp = Annotated[float, BeforeValidator(_seconds), WithJsonSchema({"type": "string", "format": "date-time"})]
"""RFC 3339 in; seconds since the epoch to us. Without a zone it is UTC."""
Offset = Annotated[int, Query(ge=0, le=INT32, description="Rows to skip.")]
Limit = Annotated[int, Query(ge=0, le=INT32, description="At most so many; 0: as many as a page can hold.")]
States = Annotated[list[str], Query(default_factory=list, description="Any of these states.")]
TrialId = Annotated[int, Path(ge=0, le=INT32, description="The trial's number, which is its run's number too.")]
ExperimentId = Annotated[int, Path(ge=0, le=INT32, description="The experiment's number.")]


def state_in(state: str) -> str:
    """Return a state without the prefix it travels with."""
    return state.removeprefix("STATE_")


def answer(value: dict[str, Any]) -> Response:
    """Return the HTTP answer with a value as JSON, always with status 200."""
    return Response(dump(value), media_type="application/json")


def done() -> Response:
    """Return the HTTP answer of a request that was carried out and has no result."""
    return Response(b"{}", media_type="application/json")


def encode_line(result: dict[str, Any]) -> bytes:
    """Return a line of an answer."""
    return dump({"result": result}) + b"\n"


def rows_of_page(limit: int) -> int:
    """Return the number of rows in a page, for the limit of a request."""
    return min(limit or MAX_ROWS, MAX_ROWS)


async def answer_page(
    key: str, shape: Callable[[T], dict[str, Any]], views: Sequence[T], total: int, *, offset: int, limit: int
) -> Response:
    """Return the HTTP answer with a page of a list of ``total`` rows.

    The next page starts at ``endIndex``, until that reaches ``total``.

    Args:
        key: Key of the rows.
        shape: Shape of a row, as clients expect it.
        views: Rows.
        total: Number of rows of all pages.
        offset: Offset that was asked for.
        limit: Limit that was asked for.
    """
    pagination = {
        "offset": offset,
        "limit": limit,
        "startIndex": min(offset, total),
        "endIndex": offset + len(views),
        "total": total,
    }
    # In a thread: 2,000 experiments take 0.3 s.
    return await asyncio.to_thread(lambda: answer({key: list(map(shape, views)), "pagination": pagination}))
