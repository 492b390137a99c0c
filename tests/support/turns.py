"""Tests with the mark ``alone`` have the machine to themselves, also where several run at a time (pytest-xdist)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

GATE, ROOM = 0, 1
"""Bytes of a file of all workers that are locked: a test goes in by the gate, and is in the room while it runs."""
LOCKS = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the test's turn; outside of what pytest-timeout measures."""
    with turn(item.config, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextlib.contextmanager
def turn(config: pytest.Config, *, alone: bool) -> Iterator[None]:
    """Be in the room: with nobody else, or with others that need not be alone."""
    if not hasattr(config, "workerinput"):  # there are no others
        yield
        return
    if LOCKS not in config.stash:
        path = Path(config.getoption("basetemp")).parent / "turns"  # the folders of all workers are there
        config.stash[LOCKS] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    locks, kind = config.stash[LOCKS], fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    fcntl.lockf(locks, kind, 1, GATE)  # one that is to be alone keeps it while it waits and runs: nobody comes after it
    fcntl.lockf(locks, kind, 1, ROOM)
    if not alone:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, GATE)
    try:
        yield
    finally:
        fcntl.lockf(locks, fcntl.LOCK_UN)
