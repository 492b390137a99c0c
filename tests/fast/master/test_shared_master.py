"""A master that tests share is left by each as it was found."""

from __future__ import annotations

from pathlib import Path

from support.jobs import supervisors
from support.real_master import RealMaster
from support.recipe import config, files


def test_what_a_test_made_is_ended_and_nothing_else(shared_master: RealMaster, tmp_path: Path) -> None:
    script = config("hold.py .", tmp_path, {"name": "single", "max_length": 1})
    unmanaged = "{name: x, searcher: {name: single, metric: unmanaged, max_length: 1}}"
    with shared_master.lent() as real:
        others = real.create(script, files(), activate=False)
        open_ = real.post("experiments", {"config": unmanaged, "unmanaged": True})["experiment"]["id"]
        with real.lent():
            running = real.create(script, files())
            real.running(running)
            waits = real.create(script, files(), activate=False)
            assert supervisors(real.home, running)
            real.kill()
        assert not supervisors(real.home, running)
        states = [real.get(f"experiments/{n}")["experiment"]["state"] for n in (others, open_, running, waits)]
        assert states == ["STATE_PAUSED", "STATE_ACTIVE", "STATE_CANCELED", "STATE_CANCELED"]
