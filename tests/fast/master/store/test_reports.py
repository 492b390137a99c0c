"""Checkpoints and logs, on each kind of database; and the end of an experiment."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from det_core.errors import StoreConflict
from det_core.master.store import (
    METADATA,
    LogLine,
    allocations,
    checkpoints,
    experiments,
    ingest,
    logs,
    operations,
    searcher_events,
    tokens,
    trials,
)

FILES = {"sub/": 0, "sub/f": 2, "metadata.json": 26}


def register(conn: Connection, uuid: str = "c1", steps: int = 3, **changes: Any) -> bool:
    said: dict[str, Any] = {
        "experiment_id": 1,
        "trial_id": 1,
        "task_id": "1.r1",
        "steps_completed": steps,
        "metadata": {"steps_completed": steps},
        "resources": FILES,
        "report_time": 100.0 + steps,
        **changes,
    }
    return checkpoints.register(conn, uuid, **said)


def test_a_checkpoint_is_registered_once(conn: Connection, trial: int) -> None:
    assert register(conn)
    assert not register(conn)
    assert not register(conn, report_time=999.0, resources=dict(reversed(FILES.items())))
    for change in ({"resources": {**FILES, "more": 1}}, {"metadata": {"steps_completed": 4}}):
        with pytest.raises(StoreConflict, match="checkpoint c1 was reported before"):
            register(conn, **change)
    row = checkpoints.get(conn, "c1")
    assert row is not None and (row.state, row.size, row.resources, row.report_time) == ("COMPLETED", 28, FILES, 103.0)
    assert checkpoints.get(conn, "nul\0") is None


def test_a_repeat_stays_one_when_the_checkpoint_has_changed(conn: Connection, trial: int) -> None:
    register(conn)
    checkpoints.set_metadata(conn, "c1", {"steps_completed": 3, "note": "good"})
    checkpoints.set_resources(conn, "c1", {})
    assert not register(conn)
    row = checkpoints.get(conn, "c1")
    assert row is not None and (row.state, row.size, row.metadata["note"]) == ("DELETED", 0, "good")


@pytest.mark.parametrize(
    ("left", "state", "kept"),
    [
        (FILES, "COMPLETED", FILES),
        ({"sub/f": 2}, "PARTIALLY_DELETED", {"sub/f": 2}),
        ({}, "DELETED", {}),
    ],
)
def test_what_a_deletion_leaves_decides_the_state(
    conn: Connection, trial: int, left: dict[str, int], state: str, kept: dict[str, int]
) -> None:
    register(conn)
    for _ in range(2):
        row = checkpoints.set_resources(conn, "c1", left)
        assert row is not None and (row.state, row.resources, row.size) == (state, kept, sum(kept.values()))


def test_a_metadata_file_that_is_new_is_no_change(conn: Connection, trial: int) -> None:
    register(conn, resources={"f": 1})
    row = checkpoints.set_resources(conn, "c1", {"f": 1, "metadata.json": 9})
    assert row is not None and (row.state, row.resources) == ("COMPLETED", {"f": 1})
    assert checkpoints.set_resources(conn, "unknown", {}) is None


def test_the_latest_is_the_complete_one_of_the_most_steps(conn: Connection, trial: int) -> None:
    assert checkpoints.latest(conn, trial) is None
    for uuid, steps, time in [("a", 5, 1.0), ("b", 7, 2.0), ("c", 7, 3.0), ("d", 6, 4.0)]:
        register(conn, uuid, steps, report_time=time)
    assert checkpoints.latest(conn, trial).uuid == "c"  # type: ignore[union-attr]
    checkpoints.set_resources(conn, "c", {})
    assert checkpoints.latest(conn, trial).uuid == "b"  # type: ignore[union-attr]
    assert checkpoints.latest_of_trials(conn, [trial, 2]) == {trial: "b"}
    assert [c.uuid for c in checkpoints.of_trial(conn, trial)] == ["d", "c", "b", "a"]
    assert [c.uuid for c in checkpoints.of_experiment(conn, 1, states=["COMPLETED"])] == ["d", "b", "a"]
    assert checkpoints.of_trial(conn, 2**70) == checkpoints.of_experiment(conn, 2) == []


def test_log_lines_are_followed_by_their_ids(conn: Connection) -> None:
    lines = [LogLine("1.r1", f"line {i}\n", float(i), rank=i % 2, level="ERROR") for i in range(25)]
    logs.append(conn, lines[:10])
    logs.append(conn, [LogLine("2.r1", "other nul \0\n", 1.0)])
    logs.append(conn, lines[10:])
    logs.append(conn, [])
    first = logs.after(conn, "1.r1", limit=10)
    rest = logs.after(conn, "1.r1", first[-1].id)
    assert [row.log for row in first + rest] == [line.log for line in lines]
    assert [row.id for row in first + rest] == sorted(row.id for row in first + rest)
    assert (first[1].rank, first[1].level, first[1].stdtype, first[1].source) == (1, "ERROR", "stdout", "task")
    assert logs.after(conn, "1.r1", 2**80) == []
    assert [row.log for row in logs.last(conn, "1.r1", limit=2)] == ["line 23\n", "line 24\n"]
    assert logs.last_id(conn, "1.r1") == rest[-1].id
    assert logs.last_id(conn, "3.r1") == 0
    assert logs.after(conn, "2.r1")[0].log == "other nul \ufffd\n"


def test_what_belongs_to_a_deleted_experiment_goes_and_nothing_else(conn: Connection, trial: int) -> None:
    other = experiments.create(conn, state="ACTIVE", name="other", config={})
    assert other is not None
    second = trials.create(conn, other.id, "r1", state="ACTIVE", hparams={}).id
    before = None
    for experiment, number in [(1, trial), (other.id, second)]:
        if experiment == other.id:
            before = _counts(conn)
        task = f"{experiment}.r1"
        allocations.create(conn, f"{task}.1", number, 1, state="RUNNING")
        tokens.add(conn, task, "allocation", allocation_id=f"{task}.1")
        operations.add(conn, number, 1)
        searcher_events.add(conn, experiment, {}, [])
        ingest.insert_journal(conn, number, 1, 0, [{"kind": "status", "seq": 0, "time": 1.0, "body": {}}])
        ingest.report(conn, number, 1, "training", 1, {"a": 1})
        logs.append(conn, [LogLine(task, "x", 1.0)])
        trials.set_metadata(conn, number, {"a": 1})
    experiments.erase(conn, other.id)
    assert _counts(conn) == before


def _counts(conn: Connection) -> dict[str, int]:
    return {
        name: conn.execute(select(func.count()).select_from(table)).scalar_one()
        for name, table in METADATA.tables.items()
    }
