"""Trials that finish at once, by the thousand: each runs once, two at a time, and the master stays small."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from det_core.client import connect, create_experiment
from support.real_master import real_master

COUNT = 1000
MOST_MEMORY = 500e6


def test_trials_that_finish_at_once(tmp_path: Path) -> None:
    config = {
        "name": "many",
        "entrypoint": ["true"],
        "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": COUNT},
        "max_restarts": 0,
    }
    with real_master(tmp_path / "home", "--slots", "2") as real:
        with connect(real.url, real.token) as master:
            experiment = create_experiment(config, master=master)
            assert experiment.wait() == "COMPLETED"
            trials = experiment.trials()
        memory = Path(f"/proc/{real.process.pid}/status").read_text()
        query = "SELECT trial_id, run_id, exit_kind, exit_status, create_time, end_time FROM allocations"
        with contextlib.closing(sqlite3.connect(real.home / "master" / "master.db")) as db:
            runs = db.execute(query).fetchall()
    assert [(t.state, t.restarts) for t in trials] == [("COMPLETED", 0)] * COUNT
    assert len({t.hparams["lr"] for t in trials}) == COUNT
    assert sorted(run[:4] for run in runs) == [(t.id, 1, "stopped", 0) for t in trials]
    at_a_time, most = 0, 0
    for _, change in sorted([(run[5], -1) for run in runs] + [(run[4], 1) for run in runs]):
        at_a_time += change
        most = max(most, at_a_time)
    assert most == 2
    peak = next(int(line.split()[1]) * 1024 for line in memory.splitlines() if line.startswith("VmHWM"))
    assert peak <= MOST_MEMORY, f"the master has had {peak / 1e6:.0f} MB"
