"""The venv of the frameworks, machines and a Slurm for the tests of launchers."""

from __future__ import annotations

import pytest

from support.frameworks import need
from support.hosts import hosts, three_hosts
from support.slurm import slurm

__all__ = ["hosts", "slurm", "three_hosts"]

LONG = ("test_example_deepspeed_trial.py", "test_quickstart_frameworks.py", "test_deepspeed_resume.py")


@pytest.fixture(autouse=True)
def frameworks() -> None:
    """What all of them run."""
    need()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of minutes begin first, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)
