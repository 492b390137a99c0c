"""Batches of a loader that fails while a stop is pending."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from det_core._training.loader_errors import LoaderBatches

STOP = SimpleNamespace(requested=True)
GOES_ON = SimpleNamespace(requested=False)


class Loader:
    """Gives the numbers below 6; fails at each of ``failures``, and in its start where that is one."""

    def __init__(self, *failures: int | str) -> None:
        self.failures = list(failures)
        self.opened: list[int] = []
        self.errors: list[Exception] = []

    def open_from(self, drawn: int) -> Iterator[int]:
        self.opened.append(drawn)
        self._fail("start")
        return self._numbers(drawn)

    def _numbers(self, drawn: int) -> Iterator[int]:
        for number in range(drawn, 6):
            self._fail(number)
            yield number

    def _fail(self, at: int | str) -> None:
        if at in self.failures:
            self.failures.remove(at)
            raise OSError(f"failed at {at}")

    def batches(self, preempt: Any) -> LoaderBatches:
        return LoaderBatches(self.open_from, self.errors.append, preempt=preempt, reopen_from=self.open_from)


@pytest.mark.parametrize("failures", [(), (0,), (3,), (2, 3), ("start",), ("start", 4)], ids=str)
def test_batches_while_stop_is_pending_go_on_where_loader_failed(failures: tuple[Any, ...]) -> None:
    loader = Loader(*failures)
    assert list(loader.batches(STOP)) == list(range(6))
    assert loader.opened == [0, *(0 if failure == "start" else failure for failure in failures)]
    assert loader.errors == []


@pytest.mark.parametrize("failures", [(3, 3), ("start", "start"), ("start", 0)], ids=str)
def test_loader_that_fails_twice_at_one_batch_is_an_error(failures: tuple[Any, ...]) -> None:
    loader = Loader(*failures)
    with pytest.raises(OSError, match=f"failed at {failures[1]}") as raised:
        list(loader.batches(STOP))
    assert loader.errors == [raised.value]


@pytest.mark.parametrize("preempt", [GOES_ON, None])
def test_loader_that_fails_without_a_stop_is_an_error(preempt: Any) -> None:
    loader = Loader(3)
    batches = loader.batches(preempt)
    with pytest.raises(OSError, match="failed at 3") as raised:
        list(batches)
    assert loader.errors == [raised.value] and loader.opened == [0]


def test_batches_of_worker_that_died_before_the_signal_came_go_on() -> None:
    """The signal reaches the worker first, and its parent a moment later."""

    class Late:
        asked = 0

        @property
        def requested(self) -> bool:
            self.asked += 1
            return self.asked > 3

    def open_from(drawn: int) -> Iterator[int]:
        if not drawn:
            yield 0
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
        yield from range(drawn, 3)

    late = Late()
    assert list(LoaderBatches(open_from, print, preempt=late, reopen_from=open_from)) == [0, 1, 2]
    assert late.asked > 3
