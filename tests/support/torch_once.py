"""Work that torch does once in a process, done before the first test."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # tensors of a few numbers, in here and in what tests start


@pytest.fixture(scope="session", autouse=True)
def an_optimizer() -> None:
    """Create the first optimizer of the process.

    It loads torch._dynamo, which sets an environment variable.
    """
    torch = pytest.importorskip("torch")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.fixture(scope="session", autouse=True)
def a_small_heap(an_optimizer: None) -> Iterator[None]:
    """Keep the heap small: accelerate collects garbage at the start of each run, 0.1 s with torch and itself loaded."""
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
