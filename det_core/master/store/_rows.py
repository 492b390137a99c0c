"""Changes of a row of any table."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Update, bindparam, inspect, update
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
        parameters = {f"key_{number}": part for number, part in enumerate(keys)}
        parameters |= {mapper.columns[name].key: value for name, value in values.items()}
        session.connection().execute(_update(kind), parameters)
        return
    for name, value in values.items():
        setattr(row, name, value)


@cache
def _update(kind: type[Base]) -> Update:
    """Return the statement that changes a row; its parameters say which columns.

    Built once: SQLAlchemy takes longer to build a statement than the database to execute it.
    """
    keys = inspect(kind).primary_key
    same = [column == bindparam(f"key_{number}") for number, column in enumerate(keys)]
    return update(kind).where(*same)
