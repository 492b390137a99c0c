"""Small things of the master itself, such as the cluster's id."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from det_core.master.store import _rows
from det_core.master.store._schema import KEY_VALUES


def put(session: Session, key: str, value: Any) -> None:
    """Set a value, anything that JSON holds."""
    _rows.put(session, KEY_VALUES, {"key": key, "value": value})


def get(session: Session, key: str, default: Any = None) -> Any:
    """A value; ``default`` if none was set."""
    found = session.execute(select(KEY_VALUES.c.value).where(KEY_VALUES.c.key == key)).one_or_none()
    return default if found is None else found[0]


def remove(session: Session, key: str) -> None:
    """Unset a value."""
    session.execute(delete(KEY_VALUES).where(KEY_VALUES.c.key == key))
