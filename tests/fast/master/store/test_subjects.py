"""Experiments, trials, allocations, operations and what belongs to them, on each kind of database."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from det_core.master.service import _checkpoints, _create, _retention
from det_core.master.store import (
    change,
    experiments,
    searcher_events,
    trials,
)
from det_core.master.store.models import Context, Experiment, Operation, Storage, Trial


def loaded_anew(session: Session, row: Any) -> dict[str, Any]:
    """Return the columns of a row as the database has them."""
    session.flush()
    session.expire(row)
    session.refresh(row)
    names = [attribute.key for attribute in type(row).__mapper__.column_attrs]
    return {name: getattr(row, name) for name in names}


def test_an_experiment_is_created_changed_and_found(session: Session) -> None:
    row = Experiment(
        state="PAUSED",
        name="Größe",
        config={"searcher": {"name": "single"}},
        original_config="name: Größe\n",
        warnings=["odd"],
        seed=2**40,
        external_id="mine",
    )
    session.add(row)
    session.flush()
    columns = [attribute.key for attribute in Experiment.__mapper__.column_attrs]
    created = {name: getattr(row, name) for name in columns}
    assert loaded_anew(session, row) == created
    assert experiments.by_external_id(session, "mine") is row
    changes = {"state": "ACTIVE", "progress": 0.5, "priority": 1, "end_time": 7.5}
    change(session, Experiment, row.id, **changes)
    assert loaded_anew(session, row) == {**created, **changes}
    assert session.get(Experiment, row.id + 1) is None
    assert session.get(Experiment, 2**80) is session.get(Experiment, -1) is None


def test_change_writes_without_loading(session: Session, trial: int) -> None:
    change(session, Trial, trial, state="COMPLETED", best=math.inf)
    assert session.execute(select(Trial.state, Trial.best)).one() == ("COMPLETED", math.inf)
    assert not session.identity_map
    change(session, Operation, (trial, 0), completed=True)
    session.add(Operation(trial_id=trial, ordinal=0, length=1))
    change(session, Operation, (trial, 0), completed=True)
    assert session.scalars(select(Operation.completed)).all() == [True]


def test_experiments_are_found_by_state_and_name(session: Session) -> None:
    for name, state in [("One", "ACTIVE"), ("two%", "COMPLETED"), ("three", "DELETED")]:
        session.add(Experiment(state=state, name=name, config={}))
        session.flush()

    def names(**options: Any) -> list[str]:
        rows, _ = experiments.find(session, **options)
        return [row.name for row in rows]

    assert names() == ["One", "two%"]
    assert names(newest_first=True, limit=1) == ["two%"]
    assert names(offset=1) == ["two%"]
    assert names(states=["COMPLETED", "DELETED"]) == ["two%"]
    assert names(name="ONE") == ["One"]
    assert names(name="%") == ["two%"]
    assert experiments.find(session, limit=1)[1] == 2


def test_a_trial_is_created_once_and_changed(session: Session, trial: int) -> None:
    row = session.get(Trial, trial)
    assert row is not None
    assert (row.task_id, row.hparams, row.run_id, row.restarts) == ("1.r1", {"lr": 0.1}, 0, 0)
    assert trials.create(session, 1, "r1", state="ACTIVE", hparams={"lr": 9}) is row
    assert trials.by_request_id(session, 1, "r1") is trials.by_task_id(session, "1.r1") is row
    other = trials.create(session, 1, "r2", state="PAUSED", hparams={}, external_id="theirs", unmanaged=True)
    change(session, Trial, trial, state="COMPLETED", status="half a pair \ud800, nul \0", progress=1.0)
    assert loaded_anew(session, row)["status"] == "half a pair \ufffd, nul \ufffd"
    assert trials.of_experiment(session, 1) == [row, other]
    assert trials.of_experiment(session, 1, states=["PAUSED"]) == [other]
    assert trials.in_states(session, ["PAUSED"], unmanaged=False) == trials.of_experiment(session, 2**70) == []
    assert trials.count(session, 1, Trial.unmanaged) == 1


def test_the_last_operation_is_current(session: Session, trial: int) -> None:
    second = trials.create(session, 1, "r2", state="ACTIVE", hparams={}).id
    assert trials.current_operations(session, Trial.experiment_id == 1) == {}
    for owner, ordinal, metric in [(trial, 0, math.nan), (trial, 1, None), (second, 0, 2**80)]:
        session.add(Operation(trial_id=owner, ordinal=ordinal, length=4 + ordinal, metric=metric))
    current = trials.current_operations(session, Trial.experiment_id == 1)
    assert {owner: (row.ordinal, row.length) for owner, row in current.items()} == {trial: (1, 5), second: (0, 4)}
    assert trials.current_operations(session, Trial.id.in_([trial])).keys() == {trial}
    assert loaded_anew(session, current[second])["metric"] == 2**80
    first = session.get(Operation, (trial, 0))
    assert first is not None and math.isnan(loaded_anew(session, first)["metric"])


def test_events_are_counted_in_each_experiment(session: Session, trial: int) -> None:
    assert searcher_events.count(session, 1) == 0
    searcher_events.add(session, 1, {"kind": "started"}, [{"kind": "create", "seed": 2**31}])
    searcher_events.add(session, 1, {"kind": "completed", "metric": math.nan}, None)
    searcher_events.add(session, 1, {"kind": "exited"}, [])
    session.flush()
    session.expunge_all()
    assert [(e.ordinal, e.actions) for e in searcher_events.after(session, 1, 0)] == [(1, None), (2, [])]
    assert [e.ordinal for e in searcher_events.after(session, 1, 0, limit=1)] == [1]
    assert math.isnan(searcher_events.after(session, 1)[1].event["metric"])


def test_an_archive_is_kept_once_while_it_is_used(session: Session) -> None:
    content = bytes(range(256)) * 1000
    digest = _create.add_context(session, content)
    assert _create.add_context(session, content) == digest
    assert session.scalars(select(Context.content)).all() == [content]
    row = Experiment(state="ACTIVE", name="a", config={}, context=digest)
    session.add(row)
    _create.add_context(session, b"unused")
    _retention.drop_unused_contexts(session)
    assert session.scalars(select(Context.digest)).all() == [digest]
    row.state = "DELETED"
    _retention.drop_unused_contexts(session)
    assert session.scalars(select(Context.digest)).all() == []


def test_equal_storages_have_one_id(session: Session) -> None:
    one = _checkpoints.add_storage(session, {"type": "s3", "bucket": "b", "prefix": None})
    assert _checkpoints.add_storage(session, {"prefix": None, "bucket": "b", "type": "s3"}) == one
    assert _checkpoints.add_storage(session, {"type": "s3", "bucket": "b"}) != one
    session.expunge_all()
    row = session.get(Storage, one)
    assert row is not None and row.config == {"type": "s3", "bucket": "b", "prefix": None}
    assert session.get(Storage, 2**70) is None
