"""Invariants at the end of an experiment, whatever disturbed it: read from the master's own store."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from det_core.master.store import Store, allocations, checkpoints, metrics, operations, searcher_events, trials
from det_core.master.store._reports import LOGS
from det_core.master.store._schema import KEY_VALUES, TOKENS
from det_core.storage import DirectoryStore
from support.chaos_trial import loss
from support.mastered import check_replay, record

T = TypeVar("T")


def reading(home: Path, look: Callable[[Connection], T]) -> T:
    """Look into the store of a master that does not run."""

    async def work() -> T:
        store = Store.open(f"sqlite:///{home / 'master' / 'master.db'}")
        try:
            return await store.read(look)
        finally:
            await store.close()

    return asyncio.run(work())


def course(conn: Connection, number: int) -> dict[str, Any]:
    """Return trials, decisions, operations and metrics, without the numbers of restarts."""
    kept = record(conn, number)
    return {**kept, "trials": [{**trial, "restarts": None} for trial in kept["trials"]]}


def nothing_lost_or_doubled(conn: Connection, number: int, kills: int) -> None:
    """Check that each event, trial, operation and step is there once, in order, and that decisions match events.

    No failure is counted but for trials that were killed: ``kills`` at most.
    """
    assert sum(trial.restarts for trial in trials.of_experiment(conn, number)) <= kills
    check_replay(conn, number)
    told = Counter(json.dumps(e.event, sort_keys=True) for e in searcher_events.after(conn, number))
    assert max(told.values()) == 1, f"told twice: {told.most_common(1)}"
    for trial in trials.of_experiment(conn, number):
        assert trial.state == "COMPLETED", (trial.id, trial.state, trial.error)
        given = operations.of_trial(conn, trial.id)
        assert given and all(o.completed for o in given), (trial.id, given)
        assert [o.length for o in given] == sorted({o.length for o in given})
        runs = allocations.of_trial(conn, trial.id)
        assert sorted(a.run_id for a in runs) == list(range(1, len(runs) + 1))
        assert {a.state for a in runs} == {"ENDED"}, runs
    assert conn.execute(select(TOKENS.c.allocation_id).where(TOKENS.c.kind == "allocation")).all() == []
    assert conn.execute(select(KEY_VALUES.c.key).where(KEY_VALUES.c.key.like("log mark%"))).all() == []


def as_scripted(conn: Connection, number: int) -> None:
    """Check that every trial of ``chaos_trial`` has measured what it had to, at every step."""
    for trial in trials.of_experiment(conn, number):
        lr = trial.hparams["lr"]
        lengths = [o.length for o in operations.of_trial(conn, trial.id)]
        assert [o.metric for o in operations.of_trial(conn, trial.id)] == [loss(lr, length) for length in lengths]
        for group, steps in (("training", range(1, lengths[-1] + 1)), ("validation", lengths)):
            rows = metrics.series(conn, trial.id, group, limit=None)
            found = [(row.steps_completed, row.metrics["loss"]) for row in rows]
            assert found == [(step, loss(lr, step)) for step in steps], (trial.id, group)


def as_the_quickstart(conn: Connection, number: int) -> None:
    """Check that every trial of the quickstart has validated once after each epoch, and reported that metric."""
    for trial in trials.of_experiment(conn, number):
        given = operations.of_trial(conn, trial.id)
        epochs = given[-1].length
        training = metrics.series(conn, trial.id, "training", limit=None)
        validation = metrics.series(conn, trial.id, "validation", limit=None)
        each = len(training) // epochs
        assert [row.steps_completed for row in validation] == [each * n for n in range(1, epochs + 1)], trial.id
        assert len(training) == each * epochs
        assert [o.metric for o in given] == [validation[o.length - 1].metrics["accuracy"] for o in given]


def whole_logs(conn: Connection, number: int) -> None:
    """Check that no line of a process of ``chaos_trial`` is doubled, and none missing before the last."""
    for trial in trials.of_experiment(conn, number):
        for run in allocations.of_trial(conn, trial.id):
            lines = conn.execute(select(LOGS.c.log).where(LOGS.c.allocation_id == run.id).order_by(LOGS.c.id)).scalars()
            numbers = [int(found[1]) for line in lines if (found := re.match(r"line (\d+): ", line))]
            assert numbers == list(range(len(numbers))), (run.id, numbers)


def steps_kept(conn: Connection, number: int, saved: Path, deaths: int) -> dict[str, list[int]]:
    """Return the steps of the checkpoints that were not deleted, by trial; check that all are intact.

    Others there are only of processes that died between making one complete and journaling it: ``deaths`` at most.
    """
    store = DirectoryStore(saved)
    rows = [c for c in checkpoints.of_experiment(conn, number) if c.state != checkpoints.DELETED]
    for row in rows:
        found = store.open(row.uuid)
        found.check(found.manifest.files)
        assert found.manifest.verified and found.manifest.resources == row.resources
        assert found.metadata()["steps_completed"] == row.steps_completed == row.metadata["steps_completed"]
    listed = {header.storage_id for header in store.list()}
    unknown = listed - {row.uuid for row in rows}
    print(f"checkpoints that nobody registered: {len(unknown)}")
    assert len(unknown) <= deaths, f"of no trial: {unknown}"
    steps: dict[str, list[int]] = {}
    for trial in trials.of_experiment(conn, number):
        steps[trial.request_id] = sorted({row.steps_completed for row in rows if row.trial_id == trial.id})
    return steps
