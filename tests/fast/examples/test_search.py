"""The quickstart's digits as a search, and a small script in the same way: as the README tells it, by commands."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import schema, warm
from support.person import Person
from support.plain_halving import PlainPromotion

SCRIPT = """
import math
from det_core import core, get_cluster_info
hparams = get_cluster_info().trial.hparams
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    step = 0
    if ctx.latest_checkpoint is not None:
        with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
            step = int((path / "step").read_text())
    for op in ctx.searcher.operations():
        assert step < op.length
        while step < op.length:
            step += 1
            accuracy = 1 / (1 + abs(math.log10(hparams["lr"]) + 2)) - 1 / (1 + step)
            ctx.train.report_validation_metrics(step, {"accuracy": accuracy})
        with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(str(step))
        op.report_completed(accuracy)
"""
CONFIG = """
name: small
entrypoint: python small.py
hyperparameters: {lr: {type: log, base: 10, minval: -4, maxval: -1}}
searcher: {name: adaptive_asha, metric: accuracy, smaller_is_better: false, max_trials: 7, max_length: 4, divisor: 2}
reproducibility: {experiment_seed: 3}
max_restarts: 0
"""


@pytest.fixture
def person(home: Path, tmp_path: Path) -> Iterator[Person]:
    """Yield a user with a machine of two slots."""
    found = Person(tmp_path)
    schema.place(home / "master" / "master.db")
    try:
        found.types("det-core", "master", "up", "--slots", "2")
        yield found
    finally:
        found.leaves()


def test_a_small_search_climbs_the_rungs(person: Person, home: Path) -> None:
    """Its scripts start warm; ``tests/fast/cli/test_cli_embedded.py`` has a search of cold ones."""
    (person.folder / "project").mkdir()
    (person.folder / "project" / "small.py").write_text(SCRIPT)
    (person.folder / "small.yaml").write_text(CONFIG.replace("python", warm.python(warm.HERE)))
    told = followed(person, "small.yaml", "project", 7)
    assert brackets_of(told) == [(4, [1, 2, 4]), (3, [2, 4])]
    check_decisions(home, told, divisor=2, concurrent=[8, 8])


def followed(person: Person, config: str, folder: str, trials: int) -> Any:
    """Run an experiment to its end, check the output, fetch its best model; return its description."""
    done = person.types("det-core", "experiment", "create", config, folder, "--follow")
    assert re.search(rf"^experiment (\d+) \(\S+\): COMPLETED, {trials} trials in ", done.stdout, re.M), done.stdout
    best = re.search(r"^best trial: (\d+), accuracy (\S+) at step (\d+): \S+", done.stdout, re.M)
    checkpoint = re.search(r"^best checkpoint \(trial \d+, step (\d+)\): \S+$", done.stdout, re.M)
    command = re.search(r"^to download it: (det-core experiment download-checkpoint \d+) DIR$", done.stdout, re.M)
    assert best and checkpoint and command, done.stdout
    told = person.reads("experiment", "describe", "latest")
    measured = {trial["id"]: trial["best_metric"] for trial in told["trials"]}
    assert len(measured) == trials and measured[int(best[1])] == max(measured.values())
    assert {trial["state"] for trial in told["trials"]} == {"COMPLETED"}
    assert {trial["restarts"] for trial in told["trials"]} == {0}
    model = f"model-{told['id']}"
    person.types(*command[1].split(), model)
    kept = json.loads((person.folder / model / "metadata.json").read_text())
    assert str(kept["steps_completed"]) == (checkpoint[1] or best[3])  # another one if it is as good
    assert person.types("det-core", "experiment", "describe", "latest").stdout.count("\n") > trials
    return told


def brackets_of(told: Any) -> list[tuple[int, list[int]]]:
    """Return for each bracket its number of trials, and the lengths of its rungs."""
    return [(b["max_trials"], [rung["length"] for rung in b["rungs"]]) for b in told["search"]["rungs"]]


def check_decisions(home: Path, told: Any, *, divisor: float, concurrent: list[int]) -> None:
    """Check the decisions by the contract's rules (§12.5), for the trials in the order in which they reported."""
    rungs = told["search"]["rungs"]
    brackets = [
        PlainPromotion(lengths, divisor, most, min(most, slots))
        for (most, lengths), slots in zip(brackets_of(told), concurrent, strict=True)
    ]
    of_bracket = {
        entry["request_id"]: number for number, bracket in enumerate(rungs) for entry in bracket["rungs"][0]["entries"]
    }
    names: list[list[str]] = [[] for _ in brackets]
    first, *others = events(home, told["id"])
    given = told_shortly(first["actions"], of_bracket, names)
    assert given == [step for bracket in brackets for step in bracket.start()] and first["event"]["kind"] == "started"
    for row in others:
        event, number = row["event"], of_bracket[row["event"].get("request_id")]
        decided = told_shortly(row["actions"], of_bracket, names)
        if event["kind"] == "completed":
            trial = names[number].index(event["request_id"])
            expected = brackets[number].report(trial, -event["metric"])
            assert sorted(decided) == sorted(expected), row
        else:
            assert not [step for step in decided if step[0] != "shutdown"], row
    for bracket, shown in zip(brackets, rungs, strict=True):
        for plain, rung in zip(bracket.rungs, shown["rungs"], strict=True):
            assert [-x for x, _ in plain.entries] == [entry["metric"] for entry in rung["entries"]]
            assert len(plain.promoted) == sum(entry["state"] == "promoted" for entry in rung["entries"])
            assert rung["outstanding"] == 0
        assert len(bracket.where) == bracket.max_trials


def told_shortly(actions: list[Any], of_bracket: dict[str, int], names: list[list[str]]) -> list[tuple[Any, ...]]:
    """Return the actions with their trials' numbers in the brackets; new ones get the next."""
    steps: list[tuple[Any, ...]] = []
    for action in actions:
        kind, name = action["kind"], action.get("request_id")
        if kind == "shutdown":
            steps.append((kind,))
            continue
        known = names[of_bracket[name]]
        if kind == "create":
            known.append(name)
        trial = known.index(name)
        steps.append(("train", trial, action["length"]) if kind == "train_to" else (kind, trial))
    return steps


def events(home: Path, experiment_id: int) -> list[dict[str, Any]]:
    """Return the events of the search with its decisions, in order."""
    query = "SELECT event, actions FROM searcher_events WHERE experiment_id = ? ORDER BY ordinal"
    with contextlib.closing(sqlite3.connect(home / "master" / "master.db")) as db:
        rows = db.execute(query, (experiment_id,)).fetchall()
    return [{"event": json.loads(event), "actions": json.loads(actions)} for event, actions in rows]
