"""Requests made from the description of the API: none breaks the master, and each answer is as described."""

from __future__ import annotations

from support.running_master import Running


def test_no_request_breaks_the_master(master: Running) -> None:
    from support.sweep import Sweep, as_described

    sweep = Sweep(master, examples=1, alternating=True)
    sweep.run(master.token, as_described)
    assert sweep.made > 50
    assert {200, 400, 404} <= sweep.statuses
    assert master.ask("GET", "me").status == 200
