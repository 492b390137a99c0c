"""Invariants at the end of an experiment, whatever disturbed it: asked of the master that runs then."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from det_core.storage import DirectoryStore
from support.chaos_trial import loss
from support.master_records import RecordReader


async def course(reader: RecordReader) -> dict[str, Any]:
    """Return trials, decisions, operations and metrics, without the numbers of restarts."""
    kept = await reader.record()
    return {**kept, "trials": [{**trial, "restarts": None} for trial in kept["trials"]]}


async def nothing_lost_or_doubled(reader: RecordReader, kills: int) -> None:
    """Check that each event, trial, operation and step is there once, in order, and that decisions match events.

    No failure is counted but for trials that were killed: ``kills`` at most.
    """
    await reader.check_replay()
    found = await reader.trials()
    assert sum(trial["restarts"] for trial in found) <= kills
    notified = Counter(json.dumps(event, sort_keys=True) for event, _ in reader.events())
    assert max(notified.values()) == 1, f"notified twice: {notified.most_common(1)}"
    given = reader.operations()
    for trial in found:
        assert trial["state"] == "STATE_COMPLETED", (trial["id"], trial["state"], trial.get("error"))
        assert "allocationId" not in trial
        of_trial = given[trial["requestId"]]
        assert all(metric is not None for _, metric in of_trial), (trial["id"], of_trial)
        assert [length for length, _ in of_trial] == sorted(length for length, _ in of_trial)
    assert (await reader.get("master"))["slotsInUse"] == 0


async def as_scripted(reader: RecordReader) -> None:
    """Check that every trial of ``chaos_trial`` has measured what it had to, at every step."""
    given = reader.operations()
    for trial in await reader.trials():
        lr = trial["hparams"]["lr"]
        of_trial = given[trial["requestId"]]
        lengths = [length for length, _ in of_trial]
        assert of_trial == [(length, loss(lr, length)) for length in lengths]
        for group, steps in (("training", range(1, lengths[-1] + 1)), ("validation", lengths)):
            rows = [(step, metrics["loss"]) for step, metrics in await reader.series(trial["id"], group)]
            assert rows == [(step, loss(lr, step)) for step in steps], (trial["id"], group)


async def as_the_quickstart(reader: RecordReader) -> None:
    """Check that every trial of the quickstart has validated once after each epoch, and reported that metric."""
    given = reader.operations()
    for trial in await reader.trials():
        of_trial = given[trial["requestId"]]
        epochs = of_trial[-1][0]
        training = await reader.series(trial["id"], "training")
        validation = await reader.series(trial["id"], "validation")
        each = len(training) // epochs
        assert [step for step, _ in validation] == [each * n for n in range(1, epochs + 1)], trial["id"]
        assert len(training) == each * epochs
        assert of_trial == [(length, validation[length - 1][1]["accuracy"]) for length, _ in of_trial]


async def whole_logs(reader: RecordReader) -> None:
    """Check that no line of a process of ``chaos_trial`` is doubled, and none missing before the last."""
    for trial in await reader.trials():
        numbers: dict[str, list[int]] = {f"{trial['taskId']}.{run + 1}": [] for run in range(trial["trialRunId"])}
        for line in await reader.lines(trial["id"]):
            if (counted := re.match(r"line (\d+): ", line["log"])) is not None:
                numbers[line["allocationId"]].append(int(counted[1]))
        for allocation, of_run in numbers.items():
            assert of_run == list(range(len(of_run))), (allocation, of_run)


async def steps_kept(reader: RecordReader, saved: Path, deaths: int) -> dict[str, list[int]]:
    """Return the steps of the checkpoints that were not deleted, by trial; check that all are intact.

    Others there are only of processes that died between making one complete and journaling it: ``deaths`` at most.
    """
    store = DirectoryStore(saved)
    rows = await reader.checkpoints()
    for row in rows:
        found = store.open(row["uuid"])
        found.check(found.manifest.files)
        steps = found.metadata()["steps_completed"]
        assert found.manifest.verified
        assert found.manifest.resources == {path: int(size) for path, size in row["resources"].items()}
        assert steps == row["stepsCompleted"] == row["metadata"]["steps_completed"]
    listed = {header.storage_id for header in store.list()}
    unknown = listed - {row["uuid"] for row in rows}
    print(f"checkpoints that nobody registered: {len(unknown)}")
    assert len(unknown) <= deaths, f"of no trial: {unknown}"
    by_trial: dict[str, list[int]] = {}
    for trial in await reader.trials():
        mine = {row["stepsCompleted"] for row in rows if row["training"]["trialId"] == trial["id"]}
        by_trial[trial["requestId"]] = sorted(mine)
    return by_trial


async def is_retained(reader: RecordReader) -> bool:
    """Return whether no trial has a checkpoint but its best one and its latest, which are to stay."""
    smaller = (await reader.experiment())["smallerIsBetter"]
    by_trial: dict[int, list[dict[str, Any]]] = {}
    for row in reversed(await reader.checkpoints()):  # oldest first: of equals the newer is better
        by_trial.setdefault(row["training"]["trialId"], []).append(row)
    for rows in by_trial.values():
        measured = [row for row in reversed(rows) if "searcherMetric" in row["training"]]
        metrics = [row["training"]["searcherMetric"] for row in measured]
        best = metrics.index(min(metrics) if smaller else max(metrics)) if measured else None
        latest = max(reversed(rows), key=lambda row: row["stepsCompleted"])
        stay = {latest["uuid"]} | ({measured[best]["uuid"]} if best is not None else set())
        if {row["uuid"] for row in rows} != stay:
            return False
    return True
