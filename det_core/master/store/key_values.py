"""Small values of the master itself, such as the version that wrote the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from det_core.master.store.models import KeyValue


def put(session: Session, key: str, value: Any) -> None:
    """Set a value, anything that JSON holds."""
    session.merge(KeyValue(key=key, value=value))


def get(session: Session, key: str, default: Any = None) -> Any:
    """Return a value; ``default`` if none was set."""
    row = session.get(KeyValue, key)
    return default if row is None else row.value


def remove(session: Session, key: str) -> None:
    """Unset a value."""
    session.execute(delete(KeyValue).where(KeyValue.key == key))
