"""A real master for all tests of a session that talk to one over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import det_core.config._model  # noqa: F401  # to build its models takes long, in whichever test would be the first
from support.loop_guard import guarded_loops
from support.real_master import RealMaster, real_master


@pytest.fixture(scope="session")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMaster]:
    """Yield a master of two slots, whose trials are processes."""
    with real_master(tmp_path_factory.mktemp("real") / "home", "--slots", "2") as master:
        yield master


@pytest.fixture
def real(shared_master: RealMaster) -> Iterator[RealMaster]:
    """Yield the shared master for one test."""
    with shared_master.lent() as master:
        yield master


@pytest.fixture(autouse=True)
def loops_are_not_blocked() -> Iterator[None]:
    """Fail a test in which one callback keeps an event loop of this process busy for long."""
    with guarded_loops() as blocked:
        yield
    assert not blocked
