"""Experiments, trials, allocations, operations and what belongs to them, on each kind of database."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from sqlalchemy.orm import Session

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
from det_core.master.store.models import Record

ROWS = {
    "allocations": AllocationRow,
    "checkpoints": CheckpointRow,
    "experiments": ExperimentRow,
    "logs": LogRow,
    "operations": OperationRow,
    "records": Record,
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


def test_an_experiment_is_created_changed_and_found(session: Session) -> None:
    made = experiments.create(
        session,
        state="PAUSED",
        name="Größe",
        config={"searcher": {"name": "single"}},
        original_config="name: Größe\n",
        labels=["a", "b"],
        warnings=["odd"],
        seed=2**40,
        external_id="mine",
    )
    assert made is not None and experiments.get(session, made.id) == made
    assert experiments.create(session, state="PAUSED", name="other", config={}, external_id="mine") is None
    assert experiments.by_external_id(session, "mine") == made
    experiments.change(session, made.id, state="ACTIVE", progress=0.5, priority=1, labels=["c"], end_time=7.5)
    changed = dataclasses.replace(made, state="ACTIVE", progress=0.5, priority=1, labels=["c"], end_time=7.5)
    assert experiments.get(session, made.id) == changed
    assert experiments.get(session, made.id + 1) is None
    assert experiments.get(session, 2**80) is None


def test_experiments_are_found_by_state_name_and_label(session: Session) -> None:
    for name, state, labels in [("One", "ACTIVE", ["x"]), ("two%", "COMPLETED", ["x", "y"]), ("three", "DELETED", [])]:
        experiments.create(session, state=state, name=name, config={}, labels=labels)

    def names(**options: Any) -> list[str]:
        rows, _ = experiments.find(session, **options)
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
    assert experiments.find(session, labels=["x"], limit=1)[1] == experiments.find(session, limit=1)[1] == 2


def test_a_trial_is_created_once_and_changed(session: Session, trial: int) -> None:
    row = trials.get(session, trial)
    assert row is not None
    assert (row.task_id, row.hparams, row.run_id, row.restarts) == ("1.r1", {"lr": 0.1}, 0, 0)
    assert trials.create(session, 1, "r1", state="ACTIVE", hparams={"lr": 9}) == row
    assert trials.by_request_id(session, 1, "r1") == trials.by_task_id(session, "1.r1") == row
    other = trials.create(session, 1, "r2", state="PAUSED", hparams={}, external_id="theirs", unmanaged=True)
    trials.change(session, trial, state="COMPLETED", status="half a pair \ud800, nul \0", progress=1.0)
    changed = trials.get(session, trial)
    assert changed is not None and changed.status == "half a pair \ufffd, nul \ufffd"
    assert [t.id for t in trials.of_experiment(session, 1)] == [trial, other.id]
    assert [t.id for t in trials.of_experiment(session, 1, states=["PAUSED"])] == [other.id]
    assert [t.id for t in trials.in_states(session, ["PAUSED"], unmanaged=False)] == []
    assert experiments.trial_counts(session) == experiments.trial_counts(session, [1]) == {1: 2}
    assert trials.of_experiment(session, 2**70) == []


def test_a_trials_metadata_is_replaced(session: Session, trial: int) -> None:
    assert trials.metadata(session, trial) == trials.metadata(session, 2**70) == {}
    trials.set_metadata(session, trial, {"a": {"b": [1, None, "x"]}})
    trials.set_metadata(session, trial, {"c": math.inf})
    assert trials.metadata(session, trial) == {"c": math.inf}


def test_an_allocation_numbers_its_trials_run(session: Session, trial: int) -> None:
    first = allocations.create(session, "1.r1.1", trial, 1, state="STARTING", slots=1, slot_ids=[3])
    assert (first.slot_ids, first.acked, first.end_time) == ([3], False, None)
    assert allocations.alive(session) == [first]
    allocations.change(session, first.id, state="ENDED", exit_status=1, acked=True, facts={"cpu": 1}, end_time=9.0)
    second = allocations.create(session, "1.r1.2", trial, 2, state="STARTING", latest_checkpoint="c", steps_completed=5)
    row = trials.get(session, trial)
    assert row is not None and row.run_id == 2
    assert allocations.alive(session) == [second]
    ended = allocations.of_run(session, trial, 1)
    assert ended is not None and (ended.exit_status, ended.acked, ended.facts) == (1, True, {"cpu": 1})
    assert allocations.get(session, "nothing") is None


def test_an_operation_is_completed_once(session: Session, trial: int) -> None:
    assert operations.current(session, trial) is None
    with pytest.raises(StoreConflict, match="no operation of length 4 to complete: there is none"):
        operations.complete(session, trial, 4, 0.5)
    operations.add(session, trial, 4)
    assert operations.complete(session, trial, 4, math.nan)
    assert not operations.complete(session, trial, 4, math.nan)
    with pytest.raises(StoreConflict, match="was completed with nan already"):
        operations.complete(session, trial, 4, 0.5)
    operations.add(session, trial, 16)
    assert not operations.complete(session, trial, 4, math.nan)  # late, from before the new one
    with pytest.raises(StoreConflict, match="the current one is of length 16"):
        operations.complete(session, trial, 64, 0.5)
    current = operations.current(session, trial)
    assert current is not None and (current.ordinal, current.length, current.completed) == (1, 16, False)
    assert (
        operations.current_of_experiment(session, 1)
        == operations.current_of_trials(session, [trial, 2])
        == {trial: current}
    )
    assert [o.completed for o in operations.of_trial(session, trial)] == [True, False]


def test_an_operation_as_long_as_the_one_before_is_one_of_its_own(session: Session, trial: int) -> None:
    operations.add(session, trial, 1)
    assert operations.complete(session, trial, 1, 0.5)
    operations.add(session, trial, 1)
    assert operations.complete(session, trial, 1, 0.5)
    assert not operations.complete(session, trial, 1, 0.5)


def test_events_are_counted_in_each_experiment(session: Session, trial: int) -> None:
    assert searcher_events.count(session, 1) == 0
    assert searcher_events.add(session, 1, {"kind": "started"}, [{"kind": "create", "seed": 2**31}]) == 0
    assert searcher_events.add(session, 1, {"kind": "completed", "metric": math.nan}, None) == 1
    assert searcher_events.add(session, 1, {"kind": "exited"}, []) == 2
    assert [e.ordinal for e in searcher_events.after(session, 1)] == [0, 1, 2]
    assert [e.ordinal for e in searcher_events.after(session, 1, 0, limit=1)] == [1]
    assert math.isnan(searcher_events.after(session, 1)[1].event["metric"])


def test_tokens_are_found_by_themselves_alone_until_they_are_revoked(session: Session) -> None:
    tokens.add(session, "secret", "allocation", allocation_id="1.r1.1", trial_id=1, experiment_id=1)
    tokens.add(session, "mine", "user")
    found = tokens.find(session, "secret")
    assert found is not None and (found.kind, found.trial_id) == ("allocation", 1)
    assert "secret" not in repr(session.execute(METADATA.tables["tokens"].select()).all())
    assert tokens.find(session, "secre") is None
    assert tokens.find(session, found.digest) is None
    assert tokens.find(session, "\ud800\0") is None
    tokens.revoke(session, allocation_id="1.r1.1")
    assert tokens.find(session, "secret") is None
    assert tokens.find(session, "mine") is not None


def test_an_archive_is_kept_once_while_it_is_used(session: Session) -> None:
    content = bytes(range(256)) * 1000
    digest = contexts.put(session, content)
    assert contexts.put(session, content) == digest
    assert contexts.get(session, digest) == content
    assert contexts.get(session, "0" * 64) is None
    made = experiments.create(session, state="ACTIVE", name="a", config={}, context=digest)
    contexts.put(session, b"unused")
    assert contexts.drop_unused(session) == 1
    assert contexts.get(session, digest) == content
    assert made is not None
    experiments.change(session, made.id, state="DELETED")
    assert contexts.drop_unused(session) == 1


def test_equal_storages_have_one_id(session: Session) -> None:
    one = storages.ensure(session, {"type": "s3", "bucket": "b", "prefix": None})
    assert storages.ensure(session, {"prefix": None, "bucket": "b", "type": "s3"}) == one
    assert storages.ensure(session, {"type": "s3", "bucket": "b"}) != one
    assert storages.get(session, one) == {"type": "s3", "bucket": "b", "prefix": None}
    assert storages.get(session, 99) is storages.get(session, 2**70) is None


def test_key_values(session: Session) -> None:
    assert key_values.get(session, "cluster", "none") == "none"
    key_values.put(session, "cluster", None)
    assert key_values.get(session, "cluster", "none") is None
    key_values.put(session, "cluster", ["id"])
    assert key_values.get(session, "cluster") == ["id"]
    key_values.remove(session, "cluster")
    assert key_values.get(session, "cluster") is None
