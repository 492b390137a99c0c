"""Every GET route asked by eight threads while 64 instant trials at a time come and go."""

from __future__ import annotations

import json
from pathlib import Path

from support.readers import Readers
from support.real_master import real_master

ROUNDS = 30


def test_readers_beside_instant_trials_get_200_or_404(tmp_path: Path) -> None:
    config = {
        "name": "instant",
        "entrypoint": ["true"],
        "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": 64},
        "max_restarts": 0,
    }
    with real_master(tmp_path / "home", "--slots", "64") as real:
        readers = Readers(real.url, real.token)
        with readers.asking(8):
            for _ in range(ROUNDS):  # a minute and more
                number = real.post("experiments", {"config": json.dumps(config)})["experiment"]["id"]
                real.until(number, "STATE_COMPLETED")
                readers.max_trial_id = max(trial["id"] for trial in real.trials(number))
    assert not readers.unexpected()
    assert {route for route, status in readers.answers if status == 200} >= {"/api/v1/trials/{trial_id}/logs"}
