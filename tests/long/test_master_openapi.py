"""Thousands of requests made from the description of the API."""

from __future__ import annotations

from typing import Any

from fast.master.api.conftest import master
from support.running_master import Running
from support.sweep import Sweep, as_described

__all__ = ["master"]


def not_let_in(case: Any, response: Any) -> None:
    """Check that without a token only the routes open to everybody answer."""
    if "security" in case.operation.definition.raw:
        assert response.status_code == 401, (case.method, case.path, response.status_code)


def test_no_request_of_many_breaks_the_master(master: Running) -> None:
    sweep = Sweep(master, examples=60)
    sweep.run(master.token, as_described)
    sweep.run("not-the-token", not_let_in)
    assert sweep.made > 5000
