"""Where things lie in a bucket, and what the marks of those who are at work are called."""

from __future__ import annotations

import json
from typing import NamedTuple

from det_core.storage._names import is_inner_path
from det_core.storage._owner import Owner

ASIDE = ".det_core-tmp/"
"""The folder of the root that holds marks."""
TRASH = "deleted."
PROBE = "probe."


class WriterMark(NamedTuple):
    """``<storage_id>.<owner tag>``: this process may put objects of a checkpoint that is not listed."""

    storage_id: str
    owner: Owner


def folder_of(storage_id: str) -> str:
    """What the keys of a checkpoint begin with."""
    return f"{storage_id}/"


def writer_mark(storage_id: str, tag: str) -> str:
    """The key of a writer's mark."""
    return f"{ASIDE}{storage_id}.{tag}"


def parse_writer_mark(key: str) -> WriterMark | None:
    """What a writer's mark says; None: the key is of something else."""
    found = Owner.parse(key.removeprefix(ASIDE))
    return WriterMark(*found) if found is not None else None


def trash_mark(storage_id: str) -> str:
    """The key of the mark that a checkpoint is being deleted."""
    return f"{ASIDE}{TRASH}{storage_id}"


def mark_body(owner: Owner) -> bytes:
    """What lies in a mark, for people and for :func:`owner_in`."""
    return json.dumps({"owner": owner.tag}).encode()


def owner_in(body: bytes) -> Owner | None:
    """Who made a mark; None: it does not say."""
    try:
        found = Owner.parse("." + json.loads(body)["owner"])
    except (ValueError, TypeError, KeyError):
        return None
    return found[1] if found is not None else None


def is_readable(key: str) -> bool:
    """Whether a key below a checkpoint, or a folder's key, can be a path on a machine."""
    return is_inner_path(key.removesuffix("/"))
