"""Something that happens once, and that threads can wait for."""

from __future__ import annotations

import threading
import time

import pytest

from det_core.core._checkpoint._latch import Latch


def test_lets_all_go_who_wait_for_it_and_all_who_come_later() -> None:
    latch, let_go = Latch(), []
    waiting = [threading.Thread(target=lambda: let_go.append(latch.wait())) for _ in range(5)]
    for thread in waiting:
        thread.start()
    assert not latch.is_set and let_go == []
    latch.set()
    for thread in waiting:
        thread.join()
    assert let_go == [True] * 5
    assert latch.is_set and latch.wait() and latch.wait(0)


@pytest.mark.parametrize("timeout", [0, -1, 0.05])
def test_waits_no_longer_than_it_is_to(timeout: float) -> None:
    before = time.monotonic()
    assert not Latch().wait(timeout)
    assert time.monotonic() - before >= max(0.0, timeout)


def test_lets_go_who_waits_though_another_one_died_with_the_lock() -> None:
    latch, let_go = Latch(), []
    waiting = threading.Thread(target=lambda: let_go.append(latch.wait()))
    waiting.start()
    latch._open = True
    latch._lock.release()
    latch._lock.acquire(timeout=0.01)  # an exception came between this and the release
    waiting.join()
    assert let_go == [True]


def test_happens_once() -> None:
    latch = Latch()
    latch.set()
    with pytest.raises(AssertionError, match="once"):
        latch.set()
