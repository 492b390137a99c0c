"""Fixtures for tests of launchers: the venv of the frameworks, nodes, Slurm."""

from __future__ import annotations

import pytest

from support.frameworks import need
from support.hosts import hosts, three_hosts
from support.slurm import slurm

__all__ = ["hosts", "slurm", "three_hosts"]

LONG = ("test_example_deepspeed_trial.py", "test_quickstart_frameworks.py", "test_deepspeed_resume.py")


@pytest.fixture(autouse=True)
def frameworks() -> None:
    """Skip without the venv of the frameworks."""
    need()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that none is left to one worker at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)
