"""The schema: created whole, equal to what the code says, never half there."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, inspect
from sqlalchemy.orm import Session

import det_core
from det_core.errors import StoreError
from det_core.master.engines import LogLine, Position, TrialLog
from det_core.master.store import METADATA, Store, ingest, trials
from det_core.master.store._database import parse, writing_engine
from det_core.master.store._migrate import config, revision
from det_core.master.store.migrations import HEAD
from det_core.master.store.models import Trial


def test_empty_database_gets_newest_schema(empty_url: str) -> None:
    _open(empty_url)
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        assert revision(conn) == HEAD
        assert set(inspect(conn).get_table_names()) == {*METADATA.tables, "alembic_version"}
        assert compare_metadata(MigrationContext.configure(conn, opts={"compare_type": True}), METADATA) == []
    engine.dispose()
    _open(empty_url)


def test_newest_step_is_head() -> None:
    steps = ScriptDirectory.from_config(config(None))
    assert steps.get_current_head() == HEAD
    assert len(list(steps.walk_revisions())) == len(list((Path(steps.dir) / "versions").glob("step_*.py")))


def test_schema_that_fails_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_core.master.store._migrate.HEAD", None)
    with pytest.raises(Exception, match=r"NOT NULL|not-null"):
        _open(empty_url)
    reflected = MetaData()
    engine = writing_engine(parse(empty_url))
    with engine.begin() as conn:
        reflected.reflect(conn)
    engine.dispose()
    assert not reflected.tables


def test_database_of_first_schema_is_brought_up_to_date(empty_url: str, tmp_path: Path) -> None:
    path = old_database(empty_url)
    Store.open(empty_url, allocations=tmp_path / "allocations").close_now()
    _open(f"sqlite:///{tmp_path}/new.db")
    assert _definitions(path) == _definitions(tmp_path / "new.db")
    engine = writing_engine(parse(empty_url))
    with Session(engine) as session:
        rows = trials.of_experiment(session, 1)
        assert [(t.steps, t.latest_step, t.best_step, t.best) for t in rows] == [
            (6, 6, 4, 0.25),
            (2, 2, 2, 0.375),
            (0, None, None, None),
        ]
        ingest.report(session, 1, 3, "validation", 6, {"loss": 0.125})
        row = session.get(Trial, 1, populate_existing=True)
        assert row is not None and (row.best_step, row.best) == (6, 0.125)
    engine.dispose()


def old_database(url: str) -> Path:
    """Write a database of the first schema; return its path."""
    path = Path(str(parse(url).database))
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as old:
        old.executescript(Path(__file__).with_name("schema_0001.sql").read_text())
        columns = "task_id, allocation_id, rank, timestamp, level, stdtype, source, log"
        lines = [("1.r1", f"1.r1.{run}", 3, 5.0 + run, "ERROR", "stderr", "task", f"run {run}\n") for run in (1, 2, 1)]
        lines += [("1.r2", None, None, -1.0, "TRACE", "stdout", "mine", "sent \u00e4\n")]
        lines += [("9.none", "9.none", *lines[0][2:])]
        old.executemany(f"INSERT INTO logs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", lines)
        old.execute("INSERT INTO key_values VALUES ('log mark of 1.r1.1', '7')")
        old.commit()
    return path


def test_log_lines_become_files_although_each_try_is_killed(
    empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that ends at its N-th call to the system, for every N, leaves what the next one needs."""
    path = old_database(empty_url)
    left = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return call(*args, **options)

        return counted

    for module, name in ((os, "replace"), (os, "sync"), (Path, "mkdir"), (op, "drop_column"), (op, "drop_table")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    for point in count(1):
        left = point
        try:
            Store.open(empty_url, allocations=tmp_path / "allocations").close_now()
            break
        except KeyboardInterrupt:
            assert "logs" in _definitions(path), "the table goes last"
    assert point > 8
    logs = [TrialLog(tmp_path / "allocations", task_id, 9).read(Position()).lines for task_id in ("1.r1", "1.r2")]
    assert [(line.text, line.level, line.rank, line.allocation_id) for _, _, line in logs[0]] == [
        ("first", "INFO", None, None),
        ("run 1", "ERROR", 3, "1.r1.1"),
        ("run 2", "ERROR", 3, "1.r1.2"),
        ("run 1", "ERROR", 3, "1.r1.1"),
    ]
    ((line_id, _, line),) = logs[1]
    assert line_id == "0.0.task.0"
    assert line == LogLine(-1.0, "stdout", None, "TRACE", "sent \u00e4", "mine")
    assert not (tmp_path / "allocations" / "9.none").exists()
    assert not {"logs"} & _definitions(path).keys()
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT count(*) FROM key_values WHERE key LIKE 'log mark%'").fetchone() == (0,)


def test_database_with_trials_of_an_earlier_version_running_is_refused(empty_url: str, tmp_path: Path) -> None:
    path = old_database(empty_url)
    before = _definitions(path)
    with closing(sqlite3.connect(path)) as old:
        old.execute("UPDATE allocations SET state = 'RUNNING'")
        old.commit()
    with pytest.raises(StoreError, match=r"that an earlier version .* \(1, such as 1.r1.1\): start that"):
        Store.open(empty_url, allocations=tmp_path / "allocations")
    assert _definitions(path) == before
    assert not (tmp_path / "allocations").exists()


def test_newer_schema_is_refused_with_version_that_wrote_it(empty_url: str) -> None:
    _open(empty_url)
    _change(empty_url, "UPDATE alembic_version SET version_num = '9999'")
    mine = re.escape(det_core.__version__)
    with pytest.raises(StoreError, match=rf"by det_core {mine} \(schema 9999\), newer .*upgrade det_core"):
        _open(empty_url)
    _change(empty_url, "DROP TABLE key_values")
    with pytest.raises(StoreError, match=r"by det_core of an unknown version \(schema 9999\)"):
        _open(empty_url)


@pytest.mark.parametrize("how", ["DROP TABLE alembic_version", "DELETE FROM alembic_version"])
def test_database_without_its_version_is_refused(empty_url: str, how: str) -> None:
    _open(empty_url)
    _change(empty_url, how)
    with pytest.raises(StoreError, match=r"has the table \w+ but no version of its schema: it is damaged; restore"):
        _open(empty_url)


def _definitions(path: Path) -> dict[str, list[str]]:
    """Return the lines of each table's definition, sorted: added columns stand after the constraints."""
    with closing(sqlite3.connect(path)) as conn:
        rows = conn.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
            " AND name NOT LIKE 'alembic%' AND name NOT LIKE 'sqlite%'"
        )
        return {name: sorted(re.split(r"[\s,]+", sql)) for name, sql in rows}


def _change(url: str, statement: str) -> None:
    engine = writing_engine(parse(url))
    with engine.begin() as conn:
        conn.exec_driver_sql(statement)
    engine.dispose()


def _open(url: str) -> None:
    Store.open(url).close_now()
