"""``python -m support.dying_store URL KILLS SEED``: kill -9 a process that writes, again and again, see what is left.

A fork per kill: the parent has no threads, and imports everything once. Each child goes on where the one before it
was killed, at a random moment from its start on: while it makes the schema, opens the store, or commits groups. Every
other kill is later than the first answer, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from det_core.master.store import Store, ingest, series
from det_core.master.store._database import parse, writing_engine
from det_core.master.store._migrate import upgrade
from det_core.master.store.models import Metric
from support import key_values

WRITERS = 5
ROWS = 20
LONGEST = 0.25
"""Seconds from its start, or from an answer, after which a child is killed at the latest."""


def work(writer: int, number: int) -> Callable[[Session], None]:
    """Return a write that must be stored completely or not at all."""

    def write(session: Session) -> None:
        key_values.put(session, f"{writer}-before", number)
        first = (number - 1) * ROWS
        rows = [
            {
                "kind": "metrics",
                "seq": seq,
                "time": 1.0,
                "group": "training",
                "steps_completed": seq,
                "metrics": {"a": seq},
            }
            for seq in range(first, first + ROWS)
        ]
        ingest.insert_journal(session, writer, 1, 0, rows)
        key_values.put(session, f"{writer}-after", number)

    return write


def fails(session: Session) -> None:
    """Fail in the middle of a write that shares its transaction with others and must leave nothing."""
    key_values.put(session, "half", 1)
    raise LookupError


def child(url: str, answered: int, done: list[int]) -> NoReturn:
    """Write for ever; each number that was answered goes to the pipe."""
    store = Store.open(url)

    async def writes(writer: int) -> None:
        for number in range(done[writer] + 1, 1 << 30):
            await store.write(work(writer, number))
            os.write(answered, b"%d %d\n" % (writer, number))

    async def go() -> None:
        async def failing() -> None:
            while True:
                await asyncio.gather(store.write(fails), return_exceptions=True)

        await asyncio.gather(failing(), *map(writes, range(WRITERS)))

    asyncio.run(go())
    raise AssertionError("it writes for ever")


def killed(url: str, done: list[int], delay: float, *, answered: bool) -> list[int]:
    """Let a child write for a while, and kill it; returns the last number of each writer that was answered."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            child(url, writing, done)
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(writing)
    began = os.read(reading, 1 << 16) if answered else b""
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == -signal.SIGKILL, f"the child ended by itself: {status}"
    answers = list(done)
    with os.fdopen(reading) as pipe:
        for line in (began.decode() + pipe.read()).splitlines():
            writer, number = map(int, line.split())
            answers[writer] = number
    return answers


def kept(url: str) -> list[int]:
    """Return the last stored number of each writer; fail if a write was stored in part."""
    if url.startswith("sqlite"):  # who was killed at once has not made its folder
        Path(str(parse(url).database)).parent.mkdir(parents=True, exist_ok=True)
    engine = writing_engine(parse(url))
    try:
        upgrade(engine)
        with Session(engine) as session:
            assert key_values.get(session, "half") is None
            return [_kept(session, writer) for writer in range(WRITERS)]
    finally:
        engine.dispose()


def _kept(session: Session, writer: int) -> int:
    number = int(key_values.get(session, f"{writer}-before", 0))
    rows = session.execute(select(func.count()).select_from(Metric).where(Metric.trial_id == writer)).scalar_one()
    tally = series.summaries(session, writer).get("training", {}).get("a", {"count": 0})
    found = {
        "after": key_values.get(session, f"{writer}-after", 0),
        "rows": rows / ROWS,
        "counted": tally["count"] / ROWS,
    }
    assert set(found.values()) == {number}, f"writer {writer}: {number} works, but {found}"
    return number


def main(url: str, kills: int, seed: int) -> None:
    """Kill so often; prints how many works were answered."""
    moments = random.Random(seed)
    done = [0] * WRITERS
    for kill in range(kills):
        delay = moments.uniform(0, LONGEST)
        answers = killed(url, done, delay, answered=kill % 2 == 1)
        done = kept(url)
        lost = [
            f"writer {w}: {a} answered, {d} kept" for w, (a, d) in enumerate(zip(answers, done, strict=True)) if d < a
        ]
        assert not lost, f"kill {kill} after {delay:.3f} s: {lost}"
    print(sum(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
