"""Log lines as files in the folders of allocations; no column that nobody reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import context, op

from det_core.errors import StoreError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SEGMENT = "0.task.0"


def upgrade() -> None:
    """Write the log lines into files, then drop their table.

    A kill before the end leaves the table, and the files are replaced by the next try.

    Raises:
        StoreError: If an allocation has not ended: its supervisor writes its log in the old form.
    """
    conn = op.get_bind()
    _check_nothing_runs(conn)
    allocations: Path | None = context.config.attributes["allocations"]
    lines = _read_lines(conn)
    for (task_id, run), group in groupby(lines, key=lambda pair: pair[0]):
        if allocations is None:
            raise StoreError("the database has log lines, which a master writes into its home directory: start one")
        _write_segment(allocations / f"{task_id}.{run}" / "log", (row for _, row in group))
    os.sync()
    op.drop_column("allocations", "ready")
    op.execute("DELETE FROM key_values WHERE key LIKE 'log mark of %'")
    op.drop_table("logs")


def _check_nothing_runs(conn: sa.Connection) -> None:
    table = sa.table("allocations", sa.column("id"), sa.column("state"))
    running = conn.execute(sa.select(table.c.id).where(table.c.state != "ENDED").order_by(table.c.id)).scalars().all()
    if running:
        raise StoreError(
            f"the master's database cannot be brought up to date while trials run that an earlier version of det_core "
            f"started ({len(running)}, such as {running[0]}): start that version, and wait for them or kill them"
        )


def _read_lines(conn: sa.Connection) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield the lines of each task in order, with task and run; one that names no allocation is of the run before."""
    names = ("id", "task_id", "allocation_id", "rank", "timestamp", "level", "stdtype", "source", "log")
    logs = sa.table("logs", *map(sa.column, names))
    trials = sa.table("trials", sa.column("task_id"))
    known = sa.select(logs).join(trials, trials.c.task_id == logs.c.task_id)  # others belong to nothing
    rows = conn.execute(known.order_by(logs.c.task_id, logs.c.id).execution_options(yield_per=1000))
    for task_id, group in groupby(rows, key=attrgetter("task_id")):
        run = 0
        for row in group:
            number = re.fullmatch(r"([0-9]{1,9})", str(row.allocation_id or "").rpartition(".")[2])
            if number is not None:
                run = max(run, int(number[1]))
            yield (task_id, run), row


def _write_segment(directory: Path, rows: Iterable[Any]) -> None:
    from det_core.master.engines import LogLine, encode_line

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = directory / f"{_SEGMENT}.part"
    time = 0.0
    with open(part, "wb") as file:
        for row in rows:
            time = min(max(time, row.timestamp), 99_999_999_999.0)
            line = LogLine(row.timestamp, row.stdtype, row.rank, row.level, row.log, row.source, row.allocation_id)
            file.write(encode_line(b"%.6f" % time, line))
    os.replace(part, directory / _SEGMENT)
