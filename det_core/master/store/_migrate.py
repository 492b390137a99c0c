"""The schema of a database: created whole for a new one, brought up to date by alembic's steps for an older one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect, select
from sqlalchemy.orm import Session

import det_core
from det_core.errors import StoreError
from det_core.master.store.migrations import HEAD
from det_core.master.store.models import Base, KeyValue

DIRECTORY = Path(__file__).parent / "migrations"
VERSION_KEY = "det_core version"
"""Key of the version of det_core that opened the database last."""
_REVISIONS = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def upgrade(engine: Engine, on_new: Callable[[], None] = lambda: None, allocations: Path | None = None) -> None:
    """Bring a database to the newest schema, in one transaction: a kill leaves it as it was.

    Args:
        engine: Engine that writes.
        on_new: Called before the tables of an empty database are created; what it raises leaves the database empty.
        allocations: Directory of the allocations' folders, which get the log lines of an older schema.

    Raises:
        StoreError: If a newer det_core wrote it, or its schema is unknown.
    """
    with engine.begin() as conn:
        current = revision(conn)
        if current is None:
            _create(conn, on_new)
        elif current != HEAD:
            _take_steps(conn, current, allocations)
        with Session(conn) as session:
            session.merge(KeyValue(key=VERSION_KEY, value=det_core.__version__))
            session.commit()  # to the transaction of the connection


def revision(conn: Connection) -> str | None:
    """Return the schema of a database, or None if it has no version row."""
    if not inspect(conn).has_table(_REVISIONS.name):
        return None
    return conn.execute(select(_REVISIONS.c.version_num)).scalar()


def config(conn: Connection | None, allocations: Path | None = None) -> Any:
    """Return alembic's configuration to run the steps on a connection."""
    from alembic.config import Config

    options = Config()
    options.set_main_option("script_location", str(DIRECTORY).replace("%", "%%"))
    options.set_main_option("path_separator", "os")
    options.attributes["connection"] = conn
    options.attributes["allocations"] = allocations
    return options


def _create(conn: Connection, on_new: Callable[[], None]) -> None:
    """Create all tables and the version row, without importing alembic: a first start takes 75 ms less."""
    ours = Base.metadata.tables.keys() & set(inspect(conn).get_table_names())
    if ours:
        raise StoreError(
            f"the master's database {_name(conn)} has the table {min(ours)} but no version of its schema: "
            "it is damaged; restore a backup, or move it away to start a new one"
        )
    on_new()
    Base.metadata.create_all(conn)
    _REVISIONS.create(conn, checkfirst=True)
    conn.execute(_REVISIONS.insert().values(version_num=HEAD))


def _take_steps(conn: Connection, current: str, allocations: Path | None) -> None:
    from alembic import command
    from alembic.script.revision import ResolutionError
    from alembic.util import CommandError

    try:
        command.upgrade(config(conn, allocations), "head")
    except (CommandError, ResolutionError) as e:
        raise StoreError(
            f"the master's database {_name(conn)} was written by det_core {_writer(conn)} (schema {current}), newer "
            f"than this one ({det_core.__version__}): upgrade det_core"
        ) from e


def _writer(conn: Connection) -> str:
    row = None
    if inspect(conn).has_table(KeyValue.__tablename__):  # which a newer schema may not have any more
        row = Session(conn).get(KeyValue, VERSION_KEY)
    return "of an unknown version" if row is None else str(row.value)


def _name(conn: Connection) -> str:
    return conn.engine.url.render_as_string(hide_password=True)
