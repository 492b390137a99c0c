"""Experiments, trials, allocations, operations and what belongs to them, on each kind of database."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from sqlalchemy import Connection

from det_core.errors import StoreConflict
from det_core.master.store import (
    METADATA,
    AllocationRow,
    CheckpointRow,
    ExperimentRow,
    LogRow,
    OperationRow,
    SearcherEventRow,
    TokenRow,
    TrialRow,
    allocations,
    contexts,
    experiments,
    key_values,
    operations,
    searcher_events,
    storages,
    tokens,
    trials,
)
from det_core.master.store.series import RecordRow

ROWS = {
    "allocations": AllocationRow,
    "checkpoints": CheckpointRow,
    "experiments": ExperimentRow,
    "logs": LogRow,
    "operations": OperationRow,
    "records": RecordRow,
    "searcher_events": SearcherEventRow,
    "tokens": TokenRow,
    "trials": TrialRow,
}


def test_a_row_has_the_columns_of_its_table_in_order() -> None:
    for table, row in ROWS.items():
        fields = dataclasses.fields(row)
        columns = METADATA.tables[table].columns
        assert [field.name for field in fields] == [column.name for column in columns], table
        nullable = {column.name for column in columns if column.nullable}
        assert {f.name for f in fields if "None" in str(f.type) or f.type == "Any"} == nullable, table


def test_an_experiment_is_created_changed_and_found(conn: Connection) -> None:
    made = experiments.create(
        conn,
        state="PAUSED",
        name="Größe",
        config={"searcher": {"name": "single"}},
        original_config="name: Größe\n",
        labels=["a", "b"],
        warnings=["odd"],
        seed=2**40,
        external_id="mine",
    )
    assert made is not None and experiments.get(conn, made.id) == made
    assert experiments.create(conn, state="PAUSED", name="other", config={}, external_id="mine") is None
    assert experiments.by_external_id(conn, "mine") == made
    experiments.change(conn, made.id, state="ACTIVE", progress=0.5, priority=1, labels=["c"], end_time=7.5)
    changed = dataclasses.replace(made, state="ACTIVE", progress=0.5, priority=1, labels=["c"], end_time=7.5)
    assert experiments.get(conn, made.id) == changed
    assert experiments.get(conn, made.id + 1) is None
    assert experiments.get(conn, 2**80) is None


def test_experiments_are_found_by_state_name_and_label(conn: Connection) -> None:
    for name, state, labels in [("One", "ACTIVE", ["x"]), ("two%", "COMPLETED", ["x", "y"]), ("three", "DELETED", [])]:
        experiments.create(conn, state=state, name=name, config={}, labels=labels)

    def names(**options: Any) -> list[str]:
        rows, _ = experiments.find(conn, **options)
        return [row.name for row in rows]

    assert names() == ["One", "two%"]
    assert names(newest_first=True, limit=1) == ["two%"]
    assert names(offset=1) == ["two%"]
    assert names(states=["COMPLETED", "DELETED"]) == ["two%"]
    assert names(without=()) == ["One", "two%", "three"]
    assert names(name="ONE") == ["One"]
    assert names(name="%") == ["two%"]
    assert names(labels=["x"], offset=1, limit=1) == ["two%"]
    assert names(labels=["x", "y"]) == ["two%"]
    assert names(archived=True) == []
    assert experiments.find(conn, labels=["x"], limit=1)[1] == experiments.find(conn, limit=1)[1] == 2


def test_a_trial_is_created_once_and_changed(conn: Connection, trial: int) -> None:
    row = trials.get(conn, trial)
    assert row is not None
    assert (row.task_id, row.hparams, row.run_id, row.restarts) == ("1.r1", {"lr": 0.1}, 0, 0)
    assert trials.create(conn, 1, "r1", state="ACTIVE", hparams={"lr": 9}) == row
    assert trials.by_request_id(conn, 1, "r1") == trials.by_task_id(conn, "1.r1") == row
    other = trials.create(conn, 1, "r2", state="PAUSED", hparams={}, external_id="theirs", unmanaged=True)
    trials.change(conn, trial, state="COMPLETED", status="half a pair \ud800, nul \0", progress=1.0)
    changed = trials.get(conn, trial)
    assert changed is not None and changed.status == "half a pair \ufffd, nul \ufffd"
    assert [t.id for t in trials.of_experiment(conn, 1)] == [trial, other.id]
    assert [t.id for t in trials.of_experiment(conn, 1, states=["PAUSED"])] == [other.id]
    assert [t.id for t in trials.in_states(conn, ["PAUSED"], unmanaged=False)] == []
    assert experiments.trial_counts(conn) == experiments.trial_counts(conn, [1]) == {1: 2}
    assert trials.of_experiment(conn, 2**70) == []


def test_a_trials_metadata_is_replaced(conn: Connection, trial: int) -> None:
    assert trials.metadata(conn, trial) == trials.metadata(conn, 2**70) == {}
    trials.set_metadata(conn, trial, {"a": {"b": [1, None, "x"]}})
    trials.set_metadata(conn, trial, {"c": math.inf})
    assert trials.metadata(conn, trial) == {"c": math.inf}


def test_an_allocation_numbers_its_trials_run(conn: Connection, trial: int) -> None:
    first = allocations.create(conn, "1.r1.1", trial, 1, state="STARTING", slots=1, slot_ids=[3])
    assert (first.slot_ids, first.acked, first.end_time) == ([3], False, None)
    assert allocations.alive(conn) == [first]
    allocations.change(conn, first.id, state="ENDED", exit_status=1, acked=True, facts={"cpu": 1}, end_time=9.0)
    second = allocations.create(conn, "1.r1.2", trial, 2, state="STARTING", latest_checkpoint="c", steps_completed=5)
    row = trials.get(conn, trial)
    assert row is not None and row.run_id == 2
    assert allocations.alive(conn) == [second]
    ended = allocations.of_run(conn, trial, 1)
    assert ended is not None and (ended.exit_status, ended.acked, ended.facts) == (1, True, {"cpu": 1})
    assert allocations.get(conn, "nothing") is None


def test_an_operation_is_completed_once(conn: Connection, trial: int) -> None:
    assert operations.current(conn, trial) is None
    with pytest.raises(StoreConflict, match="no operation of length 4 to complete: there is none"):
        operations.complete(conn, trial, 4, 0.5)
    operations.add(conn, trial, 4)
    assert operations.complete(conn, trial, 4, math.nan)
    assert not operations.complete(conn, trial, 4, math.nan)
    with pytest.raises(StoreConflict, match="was completed with nan already"):
        operations.complete(conn, trial, 4, 0.5)
    operations.add(conn, trial, 16)
    assert not operations.complete(conn, trial, 4, math.nan)  # late, from before the new one
    with pytest.raises(StoreConflict, match="the current one is of length 16"):
        operations.complete(conn, trial, 64, 0.5)
    current = operations.current(conn, trial)
    assert current is not None and (current.ordinal, current.length, current.completed) == (1, 16, False)
    assert (
        operations.current_of_experiment(conn, 1) == operations.current_of_trials(conn, [trial, 2]) == {trial: current}
    )
    assert [o.completed for o in operations.of_trial(conn, trial)] == [True, False]


def test_an_operation_as_long_as_the_one_before_is_one_of_its_own(conn: Connection, trial: int) -> None:
    operations.add(conn, trial, 1)
    assert operations.complete(conn, trial, 1, 0.5)
    operations.add(conn, trial, 1)
    assert operations.complete(conn, trial, 1, 0.5)
    assert not operations.complete(conn, trial, 1, 0.5)


def test_events_are_counted_in_each_experiment(conn: Connection, trial: int) -> None:
    assert searcher_events.count(conn, 1) == 0
    assert searcher_events.add(conn, 1, {"kind": "started"}, [{"kind": "create", "seed": 2**31}]) == 0
    assert searcher_events.add(conn, 1, {"kind": "completed", "metric": math.nan}, None) == 1
    assert searcher_events.add(conn, 1, {"kind": "exited"}, []) == 2
    assert [e.ordinal for e in searcher_events.after(conn, 1)] == [0, 1, 2]
    assert [e.ordinal for e in searcher_events.after(conn, 1, 0, limit=1)] == [1]
    assert math.isnan(searcher_events.after(conn, 1)[1].event["metric"])


def test_tokens_are_found_by_themselves_alone_until_they_are_revoked(conn: Connection) -> None:
    tokens.add(conn, "secret", "allocation", allocation_id="1.r1.1", trial_id=1, experiment_id=1)
    tokens.add(conn, "mine", "user")
    found = tokens.find(conn, "secret")
    assert found is not None and (found.kind, found.trial_id) == ("allocation", 1)
    assert "secret" not in repr(conn.execute(METADATA.tables["tokens"].select()).all())
    assert tokens.find(conn, "secre") is None
    assert tokens.find(conn, found.digest) is None
    assert tokens.find(conn, "\ud800\0") is None
    tokens.revoke(conn, allocation_id="1.r1.1")
    assert tokens.find(conn, "secret") is None
    assert tokens.find(conn, "mine") is not None


def test_an_archive_is_kept_once_while_it_is_used(conn: Connection) -> None:
    content = bytes(range(256)) * 1000
    digest = contexts.put(conn, content)
    assert contexts.put(conn, content) == digest
    assert contexts.get(conn, digest) == content
    assert contexts.get(conn, "0" * 64) is None
    made = experiments.create(conn, state="ACTIVE", name="a", config={}, context=digest)
    contexts.put(conn, b"unused")
    assert contexts.drop_unused(conn) == 1
    assert contexts.get(conn, digest) == content
    assert made is not None
    experiments.change(conn, made.id, state="DELETED")
    assert contexts.drop_unused(conn) == 1


def test_equal_storages_have_one_id(conn: Connection) -> None:
    one = storages.ensure(conn, {"type": "s3", "bucket": "b", "prefix": None})
    assert storages.ensure(conn, {"prefix": None, "bucket": "b", "type": "s3"}) == one
    assert storages.ensure(conn, {"type": "s3", "bucket": "b"}) != one
    assert storages.get(conn, one) == {"type": "s3", "bucket": "b", "prefix": None}
    assert storages.get(conn, 99) is storages.get(conn, 2**70) is None


def test_key_values(conn: Connection) -> None:
    assert key_values.get(conn, "cluster", "none") == "none"
    key_values.put(conn, "cluster", None)
    assert key_values.get(conn, "cluster", "none") is None
    key_values.put(conn, "cluster", ["id"])
    assert key_values.get(conn, "cluster") == ["id"]
    key_values.remove(conn, "cluster")
    assert key_values.get(conn, "cluster") is None
