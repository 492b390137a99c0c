"""Tests of what knows torch; those of the Trainer with accelerate, and as if it was not installed."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import pytest

from support.torch_once import an_optimizer

__all__ = ["an_optimizer"]


@pytest.fixture(scope="session", autouse=True)
def a_small_heap(an_optimizer: None) -> Iterator[None]:
    """accelerate collects garbage at the start of each run: 0.1 s with all that torch and it have loaded."""
    with contextlib.suppress(ImportError):
        import accelerate  # noqa: F401
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_accelerator_stays() -> Iterator[None]:
    """Forget accelerate's settings, which otherwise live as long as the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


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
