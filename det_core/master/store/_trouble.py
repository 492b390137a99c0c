"""What a database says when it cannot go on, as one clear line."""

from __future__ import annotations

import sqlite3

from sqlalchemy import URL
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from det_core.errors import StoreError

_SQLITE = {
    "full": "the disk is full; free space there",
    "locked": "another program holds it locked; end that program (a sqlite3 shell, a backup)",
    "malformed": "the file is damaged; put a backup in its place, or move it away to begin anew",
    "not a database": "the file is damaged or no database; put a backup in its place, or move it away to begin anew",
    "readonly": "it cannot be written; check the permissions of file and folder",
    "unable to open": "it cannot be opened; check that the folder exists and can be written",
    "disk i/o error": "the disk refuses to read or write",
}


def is_trouble(error: BaseException) -> bool:
    """Whether the database is at fault, and not what it was asked."""
    if isinstance(error, DBAPIError):
        return not isinstance(error, (IntegrityError, ProgrammingError, DataError))
    return isinstance(error, (PoolTimeout, sqlite3.DatabaseError))


def explain(error: BaseException, url: URL) -> StoreError:
    """The error as it is shown."""
    cause = getattr(error, "orig", None) or error
    said = " ".join(str(cause).split())
    if url.get_backend_name() != "sqlite":
        return StoreError(f"the master's database {url.render_as_string(hide_password=True)}: {said}")
    advice = next((advice for word, advice in _SQLITE.items() if word in said.lower()), None)
    return StoreError(f"the master's database {url.database}: {f'{advice} ({said})' if advice else said}")
