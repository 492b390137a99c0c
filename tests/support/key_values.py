"""Values of the master itself, for tests of the store that need any row."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from det_core.master.store.models import KeyValue


def put(session: Session, key: str, value: Any) -> None:
    """Set a value, anything that JSON holds."""
    session.merge(KeyValue(key=key, value=value))


def get(session: Session, key: str, default: Any = None) -> Any:
    """Return a value; ``default`` if none was set."""
    row = session.get(KeyValue, key)
    return default if row is None else row.value
