"""A page of a bucket's listing, read by the C parser: botocore's takes a second for what 10,000 objects are said of.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree

from det_core.storage._objects._bucket import Entry


class Page(NamedTuple):
    """What one answer says."""

    entries: list[Entry]
    """Keys as the bucket has them."""
    next: str | None
    """What to ask the next page with; None if this was the last."""


def query_of(prefix: str, token: str | None) -> str:
    """The query that asks for the objects under a prefix, from the page of ``token`` on."""
    asked = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if token is not None:
        asked["continuation-token"] = token
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(asked.items()))


def read_page(body: bytes) -> Page:
    """Read an answer.

    Raises:
        ResponseParserError: it is no listing.
    """
    from botocore.parsers import ResponseParserError

    try:
        root = ElementTree.fromstring(body)
        space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
        if root.tag != f"{space}ListBucketResult":
            raise ValueError(f"it is a <{root.tag}>")
        quoted = root.findtext(f"{space}EncodingType") == "url"
        entries = [_entry(found, space, quoted) for found in root.iterfind(f"{space}Contents")]
        more = root.findtext(f"{space}IsTruncated", "false").strip() == "true"
        token = root.findtext(f"{space}NextContinuationToken") if more else None
        if more and not token:
            raise ValueError("there is more, but not what to ask for it with")
    except (ElementTree.ParseError, ValueError) as e:
        raise ResponseParserError(f"what the server sent is no listing of a bucket: {e}: {body[:200]!r}") from e
    return Page(entries, token)


def _entry(found: Any, space: str, quoted: bool) -> Entry:
    key, size = found.findtext(f"{space}Key"), found.findtext(f"{space}Size")
    if key is None or size is None:
        raise ValueError("an object has no key or no size")
    modified = _seconds(found.findtext(f"{space}LastModified", ""))
    return Entry(unquote_plus(key) if quoted else key, int(size), modified)


def _seconds(text: str) -> float:
    """Since the epoch, of a date as S3 writes it (2026-11-21T16:05:08.000Z) or another server may."""
    try:
        date = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        from botocore.utils import parse_timestamp

        date = parse_timestamp(text)
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
