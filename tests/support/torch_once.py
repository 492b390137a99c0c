"""What torch does once in a process, done before any test is looked at."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def an_optimizer() -> None:
    """The first optimizer of a process loads torch._dynamo, which sets an environment variable."""
    torch = pytest.importorskip("torch")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
