"""Statements for any table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import inspect, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from det_core.master.store.models import Base


def change(session: Session, kind: type[Base], key: Any, **values: Any) -> None:
    """Change columns of a row: of its object if the session has it, else by a statement, which loads nothing.

    Args:
        session: Session that writes.
        kind: Class of the row.
        key: Primary key; a tuple of more than one column.
        values: New values by the names of the class's attributes.
    """
    session.flush()  # the row may have been added in this work
    mapper = inspect(kind)
    keys = key if isinstance(key, tuple) else (key,)
    row = session.identity_map.get(mapper.identity_key_from_primary_key(keys))
    if row is None:
        same = [column == value for column, value in zip(mapper.primary_key, keys, strict=True)]
        session.connection().execute(update(kind).where(*same).values(values))
        return
    for name, value in values.items():
        setattr(row, name, value)


def insert_new(session: Session, kind: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows whose keys are not in the table, by one statement."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    session.connection().execute(insert(kind.__table__).on_conflict_do_nothing(), rows)  # type: ignore[arg-type]
