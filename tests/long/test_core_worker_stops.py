"""Every way to stop a training whose DataLoader has workers: start method, signal, to whom, and what trains.

Print one row a cell with the counts (``-s``). TRIES=3 makes it short; ``-k`` chooses cells, such as
``-k "spawn and SIGINT and bare"``.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.worker_stops import METHODS, SIGNALS, Stopped, stop

pytest.importorskip("torch")
BARE_TRIES = int(os.environ.get("TRIES", "20"))
OTHER_TRIES = min(BARE_TRIES, 5)
AT_ONCE = 2
MAX_DELAY = 0.15
"""Seconds after READY within which the signal is sent."""


@pytest.mark.parametrize("to", ["group", "each"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["bare", "accelerated", "trial", "launcher"])
def test_every_form_of_stop_saves(kind: str, method: str, number: int, to: str) -> None:
    tries(kind, method, number, to, "", BARE_TRIES if kind == "bare" else OTHER_TRIES)


@pytest.mark.parametrize("form", ["slow", "stuck", "gil"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("method", METHODS)
def test_slow_and_stuck_workers_do_not_block_the_save(method: str, number: int, form: str) -> None:
    tries("bare", method, number, "group", form, OTHER_TRIES)


def tries(kind: str, method: str, number: int, to: str, form: str, count: int) -> None:
    """Stop so many trainings, print a row, and fail unless all were right."""

    def once(_try: int) -> Stopped:
        delay = random.random() * MAX_DELAY
        return stop(kind, method, number, to_each=to == "each", form=form, delay=delay, cold=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(once, range(count)))
    saved, left = sum(r.saved for r in results), sum(bool(r.left) for r in results)
    slowest = max(r.seconds for r in results)
    statuses = sorted({str(r.status) for r in results})
    print(
        f"\n{kind:12} {method:11} {number!r:>22} {to:6} {form or 'plain':6} saved {saved} of {count}, left {left}, "
        f"status {', '.join(statuses)}, end at most {slowest:.1f} s", flush=True,
    )  # fmt: skip
    wrong = [r for r in results if not r.is_right]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[0]}"
