"""The record of an experiment, as the master's routes show it; the events of its search, which no route shows."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from det_core.search import action_from_dict, create_search, event_from_dict

GROUPS = ("training", "validation")


def parse_answer(text: bytes) -> Any:
    """Return the JSON of an answer; of one with a line each, the list of the lines' results."""
    if not text.strip():
        return []
    parsed = [json.loads(line) for line in text.splitlines()]
    return [line["result"] for line in parsed] if "result" in parsed[0] else parsed[0]


class RecordReader:
    """Reader of one experiment.

    Args:
        get: Returns the answer to ``GET /api/v1/{path}``; see :func:`parse_answer`.
        database: The master's SQLite file.
        number: The experiment.
    """

    def __init__(self, get: Callable[[str], Awaitable[Any]], database: Path, number: int) -> None:
        self.get = get
        self._database = database
        self._number = number

    async def experiment(self) -> dict[str, Any]:
        """Return the experiment."""
        found: dict[str, Any] = (await self.get(f"experiments/{self._number}"))["experiment"]
        return found

    async def trials(self) -> list[dict[str, Any]]:
        """Return its trials, by ID."""
        found: list[dict[str, Any]] = (await self.get(f"experiments/{self._number}/trials"))["trials"]
        return found

    async def checkpoints(self) -> list[dict[str, Any]]:
        """Return its checkpoints that were not deleted, newest first."""
        found = (await self.get(f"experiments/{self._number}/checkpoints"))["checkpoints"]
        return [checkpoint for checkpoint in found if checkpoint["state"] != "STATE_DELETED"]

    async def series(self, trial_id: int, group: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the steps of a trial's group, each with its metrics."""
        path = f"trials/metrics/trial_metrics?trial_ids={trial_id}&group={group}"
        rows = [row for line in await self.get(path) for row in line["metrics"]]
        return [(row["totalBatches"], row["metrics"]["avgMetrics"]) for row in rows]

    async def lines(self, trial_id: int) -> list[dict[str, Any]]:
        """Return the lines of a trial's log."""
        found: list[dict[str, Any]] = await self.get(f"trials/{trial_id}/logs")
        return found

    def events(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return what the search was notified of, each event with its decisions."""
        query = "SELECT event, actions FROM searcher_events WHERE experiment_id = ? ORDER BY ordinal"
        with contextlib.closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as conn:
            rows = conn.execute(query, (self._number,)).fetchall()
        return [(json.loads(event), json.loads(actions)) for event, actions in rows]

    def operations(self) -> dict[str, list[tuple[int, float | None]]]:
        """Return, by the trials' request IDs, the lengths that they were to train, each with the metric reported."""
        given: dict[str, dict[int, float | None]] = {}
        for event, actions in self.events():
            if event["kind"] == "completed":
                given[event["request_id"]][event["length"]] = float(event["metric"])
            for action in actions:
                if action["kind"] == "train_to":
                    lengths = given.setdefault(action["request_id"], {})
                    assert action["length"] not in lengths, f"given twice: {action}"
                    lengths[action["length"]] = None
        return {request: list(lengths.items()) for request, lengths in given.items()}

    async def record(self) -> dict[str, Any]:
        """Return the parts that no disturbance may change: the course, without times and run numbers."""
        given = self.operations()
        found = []
        for trial in await self.trials():
            last, metric = given[trial["requestId"]][-1]
            assert int(trial["operationLength"]) == last
            assert trial["operationCompleted"] is (metric is not None)
            found.append(
                {
                    "request": trial["requestId"],
                    "state": trial["state"].removeprefix("STATE_"),
                    "hparams": trial["hparams"],
                    "seed": trial["trialSeed"],
                    "restarts": trial["restarts"],
                    "operations": given[trial["requestId"]],
                    "metrics": {group: await self.series(trial["id"], group) for group in GROUPS},
                }
            )
        state = (await self.experiment())["state"].removeprefix("STATE_")
        return {"state": state, "events": self.events(), "trials": found}

    async def check_replay(self) -> None:
        """Check that the recorded events give the recorded decisions, and that no trial or step is lost or doubled."""
        config = (await self.experiment())["config"]
        search = create_search(
            config["searcher"], config["hyperparameters"], config["reproducibility"]["experiment_seed"]
        )
        created = []
        for ordinal, (event, recorded) in enumerate(self.events()):
            decided = search.handle(event_from_dict(event))
            assert decided == [action_from_dict(action) for action in recorded], f"event {ordinal} is decided otherwise"
            created += [action["request_id"] for action in recorded if action["kind"] == "create"]
        found = await self.trials()
        assert [trial["requestId"] for trial in found] == created
        for trial in found:
            steps = [step for step, _ in await self.series(trial["id"], "training")]
            assert steps == list(range(1, len(steps) + 1)), f"trial {trial['id']} has the steps {steps}"
