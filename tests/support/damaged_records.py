"""Records of journals with wrong content, and both doors by which they come."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from det_core.master._errors import Invalid
from det_core.master.engines._folder import AllocationFolder
from det_core.master.service import ServiceState, _reports, _steering
from support.journals import open_journal
from support.mastered import Bench, bench, deaf, experiments_of
from support.scripted_trials import Trial

BY_LENGTH = {"name": "async_halving", "num_rungs": 2, "max_trials": 4, "max_length": 16}
BODIES: dict[str, dict[str, Any]] = {
    "checkpoint_commit": {"storage_id": "announced"},
    "checkpoint": {"storage_id": "saved", "metadata": {"steps_completed": 3}, "resources": {"model.pt": 7}},
    "metadata": {"metadata": {"note": "mine", "nested": {"a": [1, None]}}},
    "restore": {"storage_id": "saved", "steps_completed": 3},
    "progress": {"units": 1.5},
    "status": {"status": "validating"},
    "operation": {"length": 4, "searcher_metric": 0.25},
    "preempt": {"acknowledged": True, "reason": "signal"},
    "out_of_operations": {"acknowledged": False},
    "run_end": {"outcome": "completed"},
    "early_exit": {"reason": "INVALID_HP"},
}
WRONG = (None, -1, 2**64 - 1, 1e300, "\ud800", [["x"]], {"": None})


def records() -> list[dict[str, Any]]:
    """Return a record of every kind, as they stand in a journal."""
    rows: list[dict[str, Any]] = [
        {"kind": "metrics", "group": "training", "steps_completed": 1, "metrics": {"loss": 1.0}},
        {"kind": "metrics", "group": "validation", "steps_completed": 3, "metrics": {"loss": "NaN", "t": 3},
         "batch_metrics": [{"loss": 1.0}], "nonfinite": [["metrics", "loss"]]},
    ]  # fmt: skip
    rows += [{"kind": kind, "body": body} for kind, body in BODIES.items()]
    return [{"seq": seq, "time": 1.5 + seq, **row} for seq, row in enumerate(rows)]


async def ship(service: ServiceState, trial: Trial, sent: list[Any]) -> None:
    """Ship records as a process does: what is rejected for its content is not sent again."""
    try:
        await _reports.journal(service, trial.spec.trial_id, trial.spec.trial_run_id, 0, sent)
    except Invalid:
        if len(sent) > 1:
            await ship(service, trial, sent[: len(sent) // 2])
            await ship(service, trial, sent[len(sent) // 2 :])


async def leave(b: Bench, trial: Trial, sent: list[Any]) -> None:
    """Leave records behind, as the engine hands them over."""
    assert b.engine.listener is not None
    await b.engine.listener.journal(trial.spec.allocation_id, 0, sent, 0)


async def running(b: Bench, searcher: dict[str, Any]) -> Trial:
    """Return a trial that runs, of a new experiment if none does."""
    if not b.engine.running:
        await b.create(searcher)
        await b.until(lambda: b.engine.running)
    spec = next(spec for spec in b.engine.launched if spec.allocation_id == b.engine.running[0])
    return Trial(spec, b.engine)


async def check_alive(b: Bench) -> None:
    """Check that ends are still noticed, and that their slots are free for other trials."""
    # Also those that were never launched: they would get the slots of the others.
    numbers = [view.id for view in await experiments_of(b.service)]
    for allocation_id in list(b.engine.running):
        b.engine.kill_process(allocation_id)
    for number in numbers:
        await _steering.kill(b.service, number)
        assert await b.ended(number) in ("CANCELED", "ERROR", "COMPLETED")
    number = await b.create(BY_LENGTH)
    await b.until(lambda: b.engine.launched[-1].experiment_id == number)
    b.engine.kill_process(b.engine.running[0])
    await b.until(lambda: b.engine.running)
    await _steering.kill(b.service, number)
    assert await b.ended(number) == "CANCELED"


def flip_bits(tmp_path: Path, door: str, count: int) -> None:
    """Hand over a line of a real journal again and again, each time with another bit flipped."""
    folder = AllocationFolder(tmp_path / "allocation")
    folder.journal.mkdir(parents=True)
    journal = open_journal(folder.journal)
    journal.metrics("training", 1, {"loss": 1.0})
    journal.metrics("validation", 3, {"loss": float("nan"), "t": 3})
    for kind, body in BODIES.items():
        journal.record(kind, body)
    journal.close()
    (path,) = folder.journal.glob("journal-*.jsonl")
    header, *lines = path.read_bytes().splitlines(keepends=True)
    rng = random.Random(7)

    async def main() -> None:
        async with bench(tmp_path / "home", deaf) as b:
            for _ in range(count):
                line = bytearray(rng.choice(lines))
                line[rng.randrange(len(line))] ^= 1 << rng.randrange(8)
                path.write_bytes(header + line)
                for state in folder.journal.glob("shipped-*"):
                    state.unlink()
                trial = await running(b, BY_LENGTH)
                for _, _, found in folder.read_journals(alive=door == "shipped"):
                    if door == "shipped":
                        await ship(b.service, trial, found)
                    else:
                        await leave(b, trial, found)
            await check_alive(b)

    asyncio.run(main())


def damaged(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield copies of a record, in each of which one key is missing or has a value of another type."""
    for path in _paths(record):
        for value in (..., *WRONG):
            changed = copy.deepcopy(record)
            at: Any = changed
            for key in path[:-1]:
                at = at[key]
            if value is ...:
                del at[path[-1]]
            else:
                at[path[-1]] = value
            yield changed


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))
