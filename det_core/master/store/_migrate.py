"""The schema, made or brought up to date when a store is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, inspect, text

from det_core.errors import StoreError
from det_core.master.store.migrations import HEAD

FOLDER = Path(__file__).parent / "migrations"


def upgrade(engine: Engine) -> None:
    """Bring a database to the newest schema, whole or not at all.

    Raises:
        StoreError: it was made by a newer det_core.
    """
    with engine.begin() as conn:
        if revision(conn) == HEAD:
            return
        from alembic import command
        from alembic.script.revision import ResolutionError
        from alembic.util import CommandError

        try:
            command.upgrade(config(conn), "head")
        except (CommandError, ResolutionError) as e:
            where = engine.url.render_as_string(hide_password=True)
            raise StoreError(
                f"the master's database {where} has the schema {revision(conn)}, which this det_core does not know; "
                f"it was made by a newer one: upgrade det_core ({e})"
            ) from e


def revision(conn: Any) -> str | None:
    """The schema that a database has; None for an empty one."""
    if not inspect(conn).has_table("alembic_version"):
        return None
    found: str | None = conn.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def config(conn: Any) -> Any:
    """What alembic is told: where the migrations are, and on which connection they run."""
    from alembic.config import Config

    made = Config()
    made.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    made.attributes["connection"] = conn
    return made
