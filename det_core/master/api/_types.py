"""Parts of requests and answers: the wire contract's JSON (§2.1, §2.2) as pydantic models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query
from fastapi.responses import Response, StreamingResponse
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
INT32 = 2**31 - 1
INT64 = 2**63 - 1
_FLOATS = {"nan": "nan", "infinity": "inf", "-infinity": "-inf"}


class Body(BaseModel):
    """Content of a request: camelCase or snake_case, unknown fields ignored, ``null`` as if it were absent."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def answer(value: dict[str, Any]) -> Response:
    """Return the HTTP answer with a value as JSON, always with status 200."""
    return Response(dump(value), media_type="application/json")


def rows_of_page(limit: int) -> int:
    """Return the number of rows in a page, for the limit of a request."""
    return min(limit or MAX_ROWS, MAX_ROWS)


NDJSON = "application/x-ndjson"
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}
"""Description of the answers of routes that send lines."""


def encode_line(result: dict[str, Any]) -> bytes:
    """Return a line of an answer."""
    return dump({"result": result}) + b"\n"


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


def answer_archive(archive: bytes) -> Response:
    """Return the HTTP answer with a context directory in base64, which is encoded while it is sent."""
    length = len(_ARCHIVE_HEAD) + 4 * ((len(archive) + 2) // 3) + len(_ARCHIVE_TAIL)

    async def parts() -> AsyncIterator[bytes]:
        yield _ARCHIVE_HEAD
        for start in range(0, len(archive), _ARCHIVE_PART):
            yield base64.b64encode(archive[start : start + _ARCHIVE_PART])
        yield _ARCHIVE_TAIL

    return StreamingResponse(parts(), media_type="application/json", headers={"Content-Length": str(length)})


_ARCHIVE_HEAD = b'{"b64Tgz":"'
_ARCHIVE_TAIL = b'"}'
_ARCHIVE_PART = 3 << 18  # a multiple of 3, so that only the last part has padding

NOTHING = b"{}"


def done() -> Response:
    """Return an empty answer: the request was carried out."""
    return Response(NOTHING, media_type="application/json")


def _number(value: Any) -> Any:
    return _FLOATS.get(value.lower(), value) if isinstance(value, str) else value


def _integer(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic takes true for 1
        raise ValueError("expected an integer, found a boolean")
    return value


_DATETIME = TypeAdapter(datetime)


def _seconds(value: Any) -> float:
    try:
        moment = _DATETIME.validate_python(value)
    except ValidationError:
        raise ValueError("expected a time as in RFC 3339, such as 2024-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


_ANY_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
_ANY_INTEGER = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]{1,18}$"}]}

Number = Annotated[float, BeforeValidator(_number), WithJsonSchema(_ANY_NUMBER)]
"""A float; also the strings for those that are not finite, in either of their spellings."""
Int64 = Annotated[int, Field(ge=-INT64 - 1, le=INT64), WithJsonSchema(_ANY_INTEGER, mode="validation")]
"""A 64-bit integer, as a number or in decimal digits."""
Size = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=INT64), WithJsonSchema(_ANY_INTEGER, mode="validation")]
"""A 64-bit count, as a number or in decimal digits."""
Id = Annotated[
    int, BeforeValidator(_integer), Field(ge=0, le=INT32), WithJsonSchema({"type": "integer"}, mode="validation")
]
"""The number of an experiment, trial or storage."""
Timestamp = Annotated[float, BeforeValidator(_seconds), WithJsonSchema({"type": "string", "format": "date-time"})]
"""RFC 3339 in; seconds since the epoch to us. Without a zone it is UTC."""

MAX_ROWS = 2000
"""Maximum number of rows in an answer."""
Offset = Annotated[int, Query(ge=0, le=INT32, description="Rows to skip.")]
Limit = Annotated[int, Query(ge=0, le=INT32, description="At most so many; 0: as many as a page can hold.")]

TrialId = Annotated[int, Path(ge=0, le=INT32, description="The trial's number, which is its run's number too.")]
ExperimentId = Annotated[int, Path(ge=0, le=INT32, description="The experiment's number.")]


def state_in(state: str) -> str:
    """Return a state without its prefix on the wire."""
    return state.removeprefix("STATE_")
