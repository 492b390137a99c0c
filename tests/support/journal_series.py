"""Records of journals of any content, and series compared with those of the journal's own reader."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from det_core.journal import read_run
from det_core.master.store import ingest, series

TRIAL = 1


def row(seq: int, step: int | None, group: str = "training", **values: Any) -> dict[str, Any]:
    return {
        "kind": "metrics",
        "seq": seq,
        "time": 100.0 + seq,
        "group": group,
        "steps_completed": step,
        "metrics": values or {"loss": float(seq)},
    }


def other(seq: int, kind: str, **body: Any) -> dict[str, Any]:
    return {"kind": kind, "seq": seq, "time": 100.0 + seq, "body": body}


Line = tuple[str, int | None, dict[str, float], bool]
VALUES = st.dictionaries(st.sampled_from("ab"), st.sampled_from([1.0, 2.0, math.nan]), min_size=1)
GROUPS = st.sampled_from(["training", "validation", "own"])
LINES = st.lists(st.tuples(GROUPS, st.integers(0, 6) | st.none(), VALUES, st.booleans()), max_size=8)
RUNS = st.lists(st.tuples(st.none() | st.integers(0, 6), LINES, LINES), max_size=4)


def as_records(lines: Sequence[Line], restored: int | None) -> list[dict[str, Any]]:
    """Return the rows as a journal writes them: one value for a key of a step, and batch metrics once."""
    records = [] if restored is None else [other(0, "restore", storage_id="c", steps_completed=restored)]
    known: set[Any] = set()
    for seq, (group, step, reported, batches) in enumerate(lines, start=1):
        values = {key: value for key, value in reported.items() if step is None or (group, step, key) not in known}
        batches = batches and (step is None or (group, step) not in known)
        if not values and not batches:
            continue
        known |= {(group, step, key) for key in values} | ({(group, step)} if batches else set())
        record = {**row(seq, step, group), "metrics": values}
        record["nonfinite"] = [["metrics", key] for key, value in values.items() if value != value]
        record["metrics"] = {key: "NaN" if value != value else value for key, value in values.items()}
        if not record["nonfinite"]:
            del record["nonfinite"]
        if batches:
            record["batch_metrics"] = [{"x": seq}]
        records.append(record)
    return records


CASES = {"runs": RUNS, "by_restart": st.booleans(), "seed": st.integers(0, 2**16)}


def check(scratch: Engine, runs: Any, by_restart: bool, seed: int) -> None:
    """Check records of any content, order, cut and number."""
    batches = []
    with tempfile.TemporaryDirectory() as folder, Session(scratch) as session:
        for run, (restored, *ranks) in enumerate(runs):
            for rank, lines in enumerate(ranks):
                records = as_records(lines, restored if rank == 0 else None)
                text = b"".join(orjson.dumps(record) + b"\n" for record in records)
                (Path(folder) / f"journal-{run}-{rank}.jsonl").write_bytes(text)
                cut = random.Random(seed + rank).randint(0, len(records))
                batches += [(run, rank, records[:cut]), (run, rank, records[cut:]), (run, rank, records[cut // 2 :])]
        (Path(folder) / "run.json").write_text("{}")
        random.Random(seed).shuffle(batches)
        for run, rank, records in batches:
            who = (1, rank, records, run) if by_restart else (run + 1, rank, records, 0)
            ingest.insert_journal(session, TRIAL, *who[:3], restart=who[3])
        compare(session, Path(folder))
        session.rollback()


def compare(session: Session, folder: Path) -> None:
    read = read_run(folder)
    for group in ("training", "validation", "own"):
        for superseded in (False, True):
            theirs = read.rows(group, superseded=superseded, batches=True)
            ours = series.read(session, TRIAL, group, superseded=superseded, batches=True, limit=None)
            assert sorted(map(repr, map(shown, ours))) == sorted(map(repr, map(shown, theirs)))
        visible = [r.metrics for r in series.read(session, TRIAL, group, limit=None)]
        summary = series.summaries(session, TRIAL).get(group, {})
        for key in {key for values in visible for key in values} | set(summary):
            found = [values[key] for values in visible if key in values]
            finite = [value for value in found if value == value]
            said = summary[key]
            assert (said["count"], said["sum"]) == (len(found), sum(finite))
            assert (said["min"], said["max"]) == (min(finite, default=None), max(finite, default=None))
            assert repr(said["last"]) == repr(found[-1])
    assert series.groups(session, TRIAL) == read.groups()


def shown(row: Any) -> Any:
    return row.steps_completed, sorted(row.metrics.items()), row.time, row.superseded, row.batch_metrics
