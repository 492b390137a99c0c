"""Rows as objects: small helpers that every subject uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import Executable
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

R = TypeVar("R")

BIGGEST = 2**63 - 1


def one(session: Session, statement: Executable, kind: type[R]) -> R | None:
    """The only row of a statement as a ``kind``, whose fields are its columns in order; None if there is none."""
    row = session.execute(statement).one_or_none()
    return None if row is None else kind(*row)


def many(session: Session, statement: Executable, kind: type[R]) -> list[R]:
    """The rows of a statement, each as a ``kind``."""
    return [kind(*row) for row in session.execute(statement)]


def is_id(number: int) -> bool:
    """Whether a number can be an id at all: databases refuse to look for larger ones."""
    return 0 < number <= BIGGEST


def insert_new(session: Session, table: Any, values: dict[str, Any]) -> bool:
    """Insert a row unless one of its key stands already; True if it was inserted."""
    statement = _insert(session, table).values(values).on_conflict_do_nothing()
    return bool(session.connection().execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1)


def insert_all_new(session: Session, table: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the rows whose keys are not in the table."""
    session.connection().execute(_insert(session, table).on_conflict_do_nothing(), rows)


def put(session: Session, table: Any, values: dict[str, Any]) -> None:
    """Insert a row, or replace that of the same primary key."""
    keys = [column.name for column in table.primary_key]
    others = {name: value for name, value in values.items() if name not in keys}
    session.execute(_insert(session, table).values(values).on_conflict_do_update(index_elements=keys, set_=others))


def _insert(session: Session, table: Any) -> Any:
    """An insertion that can give way to what stands, in the dialect of the database."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)
