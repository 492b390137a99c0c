"""The conformance suite for engines finds engines that are wrong."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from det_core.master.engines import Ended, Engine, Listener, LocalEngine, Slots
from support.engine_suite import EngineSuite


class Careless(LocalEngine):
    """Tells every end twice, forgets the logs of what has ended, and kills without a word in the report."""

    async def recover(self, known: Mapping[str, str | None], listener: Listener, kept: Mapping[str, int]) -> None:
        await super().recover(known, listener, {})

    async def events(self) -> AsyncIterator[Ended]:
        async for event in super().events():
            yield event
            yield event

    async def terminate(self, allocation_id: str, grace: float) -> None:
        watch = self._watches.get(allocation_id)
        if watch is not None and watch.over is None and (found := watch.folder.processes().get("script")):
            os.kill(found[0], signal.SIGKILL)


class Suite(EngineSuite):
    def make_engine(self, home: Path, slots: int) -> Engine:
        return Careless(home, Slots(slots))


WRONG = [
    "test_bad_requests_are_refused",
    "test_an_end_is_told_to_each_engine_until_it_is_forgotten",
    "test_terminate_kills_after_the_grace_unless_it_ended",
]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_fails_the_suite(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError):
        getattr(Suite(), name)(tmp_path)


def test_a_right_thing_of_a_wrong_engine_passes(tmp_path: Path) -> None:
    names = [name for name, _ in inspect.getmembers(Suite, inspect.isfunction) if name.startswith("test_")]
    assert len(names) > 15
    Suite().test_the_context_is_where_the_script_runs(tmp_path)
