"""Timeouts of tests."""

from __future__ import annotations

import asyncio

import pytest

from support.timeouts import FAST_TIMEOUT, print_tasks


async def test_tasks_are_printed_with_the_call_that_each_waits_in(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    async def outer() -> None:
        await asyncio.Event().wait()

    waiting = asyncio.create_task(outer(), name="the one that hangs")
    await asyncio.sleep(0)
    print_tasks()
    waiting.cancel()
    printed = capsys.readouterr().err.partition("the one that hangs waits in\n")[2].splitlines()
    assert [line.rpartition(" ")[2] for line in printed[:2]] == ["outer", "wait"]
    marker = request.node.get_closest_marker("timeout")
    assert marker is None or marker.args == (FAST_TIMEOUT,)
