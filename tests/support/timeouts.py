"""Timeouts of tests that say what was waited for: the ``await`` of every task, of every event loop of the process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

FAST_TIMEOUT = 300
"""Seconds for a test of ``tests/fast``: the slowest ones take 10 on an idle machine."""
TEARDOWN_TIMEOUT = 60
"""Seconds for what a test has to do once it has timed out; whatever then waits fails as well."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the timeout of fast tests; that of the command line goes first."""
    fast = config.rootpath / "tests" / "fast"
    if config.getoption("timeout") is None:
        for item in items:
            if fast in item.path.parents and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FAST_TIMEOUT))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, Any, Any]:
    """Have pytest-timeout's signal print all tasks, and come again if the test does not end by it."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def on_timeout(number: int, frame: FrameType | None) -> None:
        print_tasks()
        signal.setitimer(signal.ITIMER_REAL, TEARDOWN_TIMEOUT)  # the test's end cancels it
        assert callable(fail)
        fail(number, frame)

    if callable(fail):
        signal.signal(signal.SIGALRM, on_timeout)
    return result


def print_tasks() -> None:
    """Print where each task of asyncio waits, in all threads."""
    # The name before Python 3.12; all_tasks() has those of one loop alone.
    tasks = getattr(asyncio.tasks, "_all_tasks", None) or asyncio.tasks._scheduled_tasks  # type: ignore[attr-defined]
    for task in [task for task in list(tasks) if not task.done()]:
        print(f"{task.get_name()} waits in", file=sys.stderr)
        for line in awaited(task.get_coro()):
            print(f"  {line}", file=sys.stderr)


def awaited(coroutine: Any) -> list[str]:
    """Return the calls in which a coroutine waits, outermost first."""
    lines = []
    while (frame := getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return lines
