"""A master whose database is PostgreSQL, from an experiment's creation over its own death to the end."""

from __future__ import annotations

from pathlib import Path

from support.postgres import Postgres
from support.processes import until
from support.real_master import real_master
from support.recipe import OURS, check_course, completed, config, files, last_row


def test_an_experiment_from_its_beginning_to_its_end(postgres_server: Postgres, tmp_path: Path) -> None:
    url = postgres_server.new_schema().replace("postgresql://", "postgresql+psycopg://")
    searcher, store = {"name": "single", "max_length": 8}, tmp_path / "store"
    with real_master(tmp_path / "home", "--slots", "1", "--db", url) as real:
        settings = config(f"older.py {OURS} 0.37", store, searcher, max_restarts=1, fail_at=3, wait_at=5)
        number = real.create(settings, files())
        until(lambda: last_row(real, number) == (5, 2))
        real.kill()
        real.start()
        real.post(f"experiments/{number}/pause")
        until(lambda: "allocationId" not in real.trials(number)[0])
        real.post(f"experiments/{number}/activate")
        check_course(real, completed(real, number))
        halving = {"name": "adaptive_asha", "max_trials": 4, "max_length": 4, "divisor": 2, "max_concurrent_trials": 1}
        lr = {"type": "double", "minval": 0, "maxval": 1}
        sampled = {"name": "optuna", "max_trials": 4, "max_length": 4, "max_concurrent_trials": 1}
        for method in (halving, sampled):
            search = real.create(config(f"older.py {OURS} 0.37", store, method, lr=lr), files())
            assert real.until(search, "STATE_COMPLETED")["numTrials"] == 4
    assert not (tmp_path / "home" / "master" / "master.db").exists()
