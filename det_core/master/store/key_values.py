"""Small things of the master itself, such as the cluster's id."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, select

from det_core.master.store import _rows
from det_core.master.store._schema import KEY_VALUES


def put(conn: Connection, key: str, value: Any) -> None:
    """Set a value, anything that JSON holds."""
    _rows.put(conn, KEY_VALUES, {"key": key, "value": value})


def get(conn: Connection, key: str, default: Any = None) -> Any:
    """A value; ``default`` if none was set."""
    found = conn.execute(select(KEY_VALUES.c.value).where(KEY_VALUES.c.key == key)).one_or_none()
    return default if found is None else found[0]


def remove(conn: Connection, key: str) -> None:
    """Unset a value."""
    conn.execute(delete(KEY_VALUES).where(KEY_VALUES.c.key == key))
