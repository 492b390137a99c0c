"""A simulated search and Python's garbage collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from det_core.search import Simulation, simulate

SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


class Knot:
    """A cycle: only the garbage collector ends it."""

    def __init__(self) -> None:
        self.knot = self


def search(trials: int, metric_of: Callable[[dict[str, Any], int, int], float]) -> Simulation:
    searcher = {"name": "adaptive_asha", "max_trials": trials, "max_length": 64, "max_concurrent_trials": 8}
    return simulate(searcher, SPACE, 3, metric_of, slots=8)


@contextmanager
def eager() -> Iterator[list[int]]:
    """A collector that is quick to look through the old objects, and the generations it looks through."""
    looked: list[int] = []
    before = gc.get_threshold()

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    gc.collect()
    gc.freeze()
    gc.collect()  # now there are few old ones; else a quarter as many must be new before they are looked through
    gc.set_threshold(100, 1, 1)
    gc.callbacks.append(told)
    try:
        yield looked
    finally:
        gc.callbacks.remove(told)
        gc.set_threshold(*before)
        gc.unfreeze()


def test_the_old_objects_are_not_looked_through() -> None:
    search(8, lambda hparams, length, number: hparams["lr"])  # all that is imported once is there now
    with eager() as looked:
        search(2000, lambda hparams, length, number: hparams["lr"])
        assert set(looked) == {0, 1}
        looked.clear()
        kept = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
    assert 2 in looked and kept, "afterwards they are again"


def test_it_makes_no_cycles() -> None:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        search(300, lambda hparams, length, number: hparams["lr"])
        gc.collect()
        assert [found for found in gc.garbage if str(getattr(found, "__module__", "")).startswith("det_core")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_young_garbage_of_the_metric_is_collected_meanwhile() -> None:
    knots: list[weakref.ref[Knot]] = []

    def metric_of(hparams: dict[str, Any], length: int, number: int) -> float:
        knots.append(weakref.ref(Knot()))
        return float(hparams["lr"])

    with eager():
        search(500, metric_of)
        assert sum(knot() is not None for knot in knots) < len(knots) / 2


def test_the_thresholds_come_back_when_the_last_of_several_is_done() -> None:
    before = gc.get_threshold()
    inside, leave = threading.Barrier(2), threading.Event()

    def metric_of(hparams: dict[str, Any], length: int, number: int) -> float:
        if number == 0 and not leave.is_set():
            inside.wait()
            assert leave.wait()
        return float(hparams["lr"])

    first = threading.Thread(target=search, args=(8, metric_of))
    first.start()
    inside.wait()
    try:
        with pytest.raises(ZeroDivisionError):
            search(8, lambda hparams, length, number: 1 / 0)
        assert gc.get_threshold() != before, "one is still at it"
    finally:
        leave.set()
        first.join()
    assert gc.get_threshold() == before
