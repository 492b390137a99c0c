"""Tests of what knows torch; those of the Trainer with accelerate, and as if it was not installed."""

from __future__ import annotations

import sys

import pytest

from support.torch_once import a_small_heap, an_optimizer, no_accelerator_stays

__all__ = ["a_small_heap", "an_optimizer", "no_accelerator_stays"]


@pytest.fixture
def with_accelerate() -> None:
    """Skip a test that trains by accelerate where it is not installed."""
    pytest.importorskip("accelerate")


@pytest.fixture
def without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test train as if accelerate was not installed."""
    monkeypatch.setitem(sys.modules, "accelerate", None)


@pytest.fixture(params=["with_accelerate", "without_accelerate"])
def strategy(request: pytest.FixtureRequest) -> str:
    """Both."""
    request.getfixturevalue(request.param)
    return str(request.param)
