"""The schema: made from nothing, equal to what the code says, never half there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, create_engine, inspect

from det_core.errors import StoreError
from det_core.master.store import METADATA, Store
from det_core.master.store._database import parse, writing_engine
from det_core.master.store._migrate import config, revision
from det_core.master.store.migrations import HEAD


def test_an_empty_database_gets_the_newest_schema_by_the_steps(empty_url: str) -> None:
    _open(empty_url)
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        assert revision(conn) == HEAD
        assert set(inspect(conn).get_table_names()) == {*METADATA.tables, "alembic_version"}
    engine.dispose()
    _open(empty_url)


def test_the_migrations_make_what_the_code_says(empty_url: str) -> None:
    _open(empty_url)
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        assert compare_metadata(MigrationContext.configure(conn, opts={"compare_type": True}), METADATA) == []
    engine.dispose()


def test_sqlite_gets_the_very_same_tables_from_either(tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path}/migrated.db").close_now()
    made = create_engine(f"sqlite:///{tmp_path}/made.db")
    METADATA.create_all(made)
    migrated = create_engine(f"sqlite:///{tmp_path}/migrated.db")
    assert _definitions(migrated) == _definitions(made)
    made.dispose()
    migrated.dispose()


def test_the_newest_step_is_the_one_named(tmp_path: Path) -> None:
    steps = ScriptDirectory.from_config(config(None))
    assert steps.get_current_head() == HEAD
    assert len(list(steps.walk_revisions())) == len(list((Path(steps.dir) / "versions").glob("step_*.py")))


def test_a_step_that_fails_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MetaData()
    monkeypatch.setattr("det_core.master.store._migrate.HEAD", "never")
    monkeypatch.setattr("alembic.operations.Operations.create_index", _fail)
    with pytest.raises(ZeroDivisionError):
        Store.open(empty_url)
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        broken.reflect(conn)
    engine.dispose()
    assert not broken.tables


def test_a_newer_schema_is_refused(empty_url: str) -> None:
    _open(empty_url)
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(StoreError, match=r"has the schema 9999.*upgrade det_core"):
        _open(empty_url)


def _fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def _definitions(engine: object) -> set[str]:
    with engine.connect() as conn:  # type: ignore[attr-defined]
        rows = conn.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'alembic%' AND sql IS NOT NULL")
        return {_ordered(sql) for (sql,) in rows}


def _ordered(sql: str) -> str:
    """Return a definition whose constraints stand in one order."""
    return " | ".join(sorted(line.strip().rstrip(",") for line in re.split(r",?\n", sql) if line.strip()))


def _open(url: str) -> None:
    Store.open(url).close_now()
