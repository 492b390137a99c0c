"""A search on a machine that is cut off from the master again and again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from support import chaos_checks
from support.chaos import trial
from support.chaos_search import calm_course, check, config
from support.processes import until
from support.remote_master import RemoteMachine, remote_machine

SEARCH = {"name": "async_halving", "max_length": 4, "num_rungs": 2, "divisor": 2, "max_trials": 4}


def search_while_cut_off(folder: Path, seconds: float) -> None:
    """Cut the machine off for some seconds while a trial ends, is killed, paused, and its experiment killed."""
    calm = calm_course(folder / "calm", SEARCH)
    with remote_machine(folder / "remote") as m:
        environment = {"environment_variables": m.variables}
        number = m.create(config(m, SEARCH, environment=environment))
        ends(m, seconds)
        is_killed(m, number, seconds)
        is_paused(m, number, seconds)
        assert m.experiment(number).wait() == "COMPLETED"
        until(lambda: asyncio.run(chaos_checks.is_retained(m.reader(number))))
        asyncio.run(check(calm)(m, m.reader(number)))
        other = m.create(config(m, SEARCH, environment=environment))
        experiment_is_killed(m, other, seconds)
        m.stop_master()
        assert not m.processes()


def ends(m: RemoteMachine, seconds: float) -> None:
    until(m.reached.exists)
    m.cut()
    m.free.touch()
    over = until(m.ends_elsewhere)
    time.sleep(seconds)
    assert m.ends_elsewhere() == over
    m.mend()
    until(lambda: not m.ends_elsewhere())


def is_killed(m: RemoteMachine, number: int, seconds: float) -> None:
    until(lambda: m.those("script"))
    m.cut()
    assert trial(m, number)
    m.moments["trial"] += 1
    over = until(m.ends_elsewhere)
    time.sleep(seconds)
    assert m.ends_elsewhere() == over
    m.mend()


def is_paused(m: RemoteMachine, number: int, seconds: float) -> None:
    """Pause the search, and kill the master, while the machine is cut off."""
    until(lambda: m.those("script"))
    m.cut()
    m.experiment(number).pause()
    m.kill_master()
    m.start()
    time.sleep(seconds)
    assert m.those("script") or m.ends_elsewhere(), "it does not know of the pause"
    m.mend()
    until(lambda: not m.those("script") and not m.ends_elsewhere())
    m.experiment(number).activate()


def experiment_is_killed(m: RemoteMachine, number: int, seconds: float) -> None:
    until(lambda: m.those("script"))
    m.cut()
    m.experiment(number).kill()
    time.sleep(seconds)
    assert m.those("script")
    assert m.goes_on(number)
    m.mend()
    assert m.experiment(number).wait() == "CANCELED"
