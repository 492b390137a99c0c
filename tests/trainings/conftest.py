"""Whole trainings: what those of trials, those of the Trainer and those on the installed wheel share."""

from __future__ import annotations

import pytest

from support.environments import dist, installed, wheel
from support.torch_once import a_small_heap, an_optimizer, no_accelerator_stays

__all__ = ["a_small_heap", "an_optimizer", "dist", "installed", "no_accelerator_stays", "wheel"]

LONG = (
    "test_example_pytorch_trial.py",
    "test_example_accelerated.py",
    "test_quickstart_frameworks.py",
    "test_readme.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of minutes, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)
