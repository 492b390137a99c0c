"""A master for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.running_master import Running


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a master that takes bodies of up to 1 MiB."""
    running = Running(tmp_path_factory.mktemp("master"), limit=1 << 20)
    yield running
    running.close()
