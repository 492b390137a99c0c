"""Checkpoints, on each kind of database; and the end of an experiment."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from det_core.errors import StoreConflict
from det_core.master.store import (
    METADATA,
    change,
    checkpoints,
    experiments,
    ingest,
    searcher_events,
    trials,
)
from det_core.master.store.models import Allocation, Checkpoint, Operation, Token
from fast.master.store.conftest import add_trial

FILES = {"sub/": 0, "sub/f": 2, "metadata.json": 26}


def register(session: Session, uuid: str = "c1", steps: int = 3, **changes: Any) -> bool:
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
    return checkpoints.register(session, uuid, **said)


def test_a_checkpoint_is_registered_once(session: Session, trial: int) -> None:
    assert register(session)
    assert not register(session)
    assert not register(session, report_time=999.0, resources=dict(reversed(FILES.items())))
    for other in ({"resources": {**FILES, "more": 1}}, {"metadata": {"steps_completed": 4}}):
        with pytest.raises(StoreConflict, match="checkpoint c1 was reported before"):
            register(session, **other)
    row = session.get(Checkpoint, "c1")
    assert row is not None and (row.state, row.size, row.resources, row.report_time) == ("COMPLETED", 28, FILES, 103.0)
    assert session.get(Checkpoint, "nul\0") is None


def test_a_repeat_stays_one_when_the_checkpoint_has_changed(session: Session, trial: int) -> None:
    register(session)
    change(session, Checkpoint, "c1", user_metadata={"steps_completed": 3, "note": "good"})
    checkpoints.set_resources(session, "c1", {})
    assert not register(session)
    row = session.get(Checkpoint, "c1")
    assert row is not None and (row.state, row.size, row.user_metadata["note"]) == ("DELETED", 0, "good")


def test_a_metadata_file_that_is_new_is_no_change(session: Session, trial: int) -> None:
    register(session, resources={"f": 1})
    checkpoints.set_resources(session, "c1", {"f": 1, "metadata.json": 9})
    row = session.get(Checkpoint, "c1")
    assert row is not None and (row.state, row.resources) == ("COMPLETED", {"f": 1})
    checkpoints.set_resources(session, "unknown", {})


def test_the_latest_is_the_complete_one_of_the_most_steps(session: Session, trial: int) -> None:
    assert checkpoints.latest(session, trial) is None
    for uuid, steps, time in [("a", 5, 1.0), ("b", 7, 2.0), ("c", 7, 3.0), ("d", 6, 4.0)]:
        register(session, uuid, steps, report_time=time)
    assert checkpoints.latest(session, trial).uuid == "c"  # type: ignore[union-attr]
    checkpoints.set_resources(session, "c", {})
    assert checkpoints.latest(session, trial).uuid == "b"  # type: ignore[union-attr]
    session.flush()
    assert checkpoints.latest_of_trials(session, [trial, 2]) == {trial: "b"}
    rows, total = checkpoints.page(session, Checkpoint.trial_id == trial, 2, 1)
    assert ([c.uuid for c in rows], total) == (["c", "b"], 4)
    assert [c.uuid for c in checkpoints.of_experiment(session, 1, states=["COMPLETED"])] == ["d", "b", "a"]
    assert checkpoints.of_experiment(session, 2) == []


def test_what_belongs_to_a_deleted_experiment_goes_and_nothing_else(session: Session, trial: int) -> None:
    second = add_trial(session)
    before = None
    for experiment, number in [(1, trial), (2, second)]:
        if experiment == 2:
            before = _counts(session)
        task = f"{experiment}.r1"
        session.add(Allocation(id=f"{task}.1", trial_id=number, run_id=1, state="RUNNING"))
        session.add(Token(digest=task, kind="allocation", allocation_id=f"{task}.1"))
        session.add(Operation(trial_id=number, ordinal=0, length=1))
        searcher_events.add(session, experiment, {}, [])
        ingest.insert_journal(session, number, 1, 0, [{"kind": "status", "seq": 0, "time": 1.0, "body": {}}])
        ingest.report(session, number, 1, "training", 1, {"a": 1})
        trials.set_metadata(session, number, {"a": 1})
    experiments.erase(session, 2)
    assert _counts(session) == before


def _counts(session: Session) -> dict[str, int]:
    return {
        name: session.execute(select(func.count()).select_from(table)).scalar_one()
        for name, table in METADATA.tables.items()
    }
