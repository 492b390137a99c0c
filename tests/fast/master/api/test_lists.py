"""Lists in pages, as the contract's clients read them."""

from __future__ import annotations

from typing import Any

import pytest

from det_core import client
from det_core.master.api import _types
from support.running_master import TOKEN, Running

GRID = """
name: test
entrypoint: "true"
hyperparameters: {lr: {type: categorical, vals: [1, 2, 3]}}
searcher: {name: grid, metric: loss, max_length: 1}
"""


def test_trials_of_an_experiment_come_in_pages(master: Running) -> None:
    experiment_id = master.created(GRID)
    ids = sorted(spec.trial_id for spec in master.launched(experiment_id, 3))
    path = f"experiments/{experiment_id}/trials"
    whole = master.ask("GET", path).json
    assert [trial["id"] for trial in whole["trials"]] == ids
    assert whole["pagination"] == {"offset": 0, "limit": 0, "startIndex": 0, "endIndex": 3, "total": 3}
    part = master.ask("GET", f"{path}?offset=1&limit=1").json
    assert [trial["id"] for trial in part["trials"]] == [ids[1]]
    assert part["pagination"] == {"offset": 1, "limit": 1, "startIndex": 1, "endIndex": 2, "total": 3}
    after = master.ask("GET", f"{path}?offset=9").json
    assert after["trials"] == [] and after["pagination"]["endIndex"] >= after["pagination"]["total"] == 3


def test_list_of_trials_without_limit_comes_in_pages(master: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_types, "MAX_ROWS", 2)
    experiment_id = master.created(GRID)
    ids = sorted(spec.trial_id for spec in master.launched(experiment_id, 3))
    first = master.ask("GET", f"experiments/{experiment_id}/trials").json
    assert [trial["id"] for trial in first["trials"]] == ids[:2]
    assert (first["pagination"]["endIndex"], first["pagination"]["total"]) == (2, 3)
    monkeypatch.setenv("DET_USER_TOKEN", TOKEN)
    assert client.experiment(experiment_id, master.url).trial_ids() == ids


def test_list_of_experiments_without_limit_comes_in_pages(master: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_types, "MAX_ROWS", 2)
    body = {"config": "name: listed\nsearcher: {name: single, metric: loss}", "unmanaged": True}
    ids = [master.ask("POST", "experiments", body).json["experiment"]["id"] for _ in range(3)]
    first = master.ask("GET", "experiments?name=listed").json
    assert [experiment["id"] for experiment in first["experiments"]] == ids[:2]
    assert first["pagination"] == {"offset": 0, "limit": 0, "startIndex": 0, "endIndex": 2, "total": 3}
    rest = master.ask("GET", "experiments?name=listed&offset=2").json
    assert [experiment["id"] for experiment in rest["experiments"]] == ids[2:]
    monkeypatch.setenv("DET_USER_TOKEN", TOKEN)
    assert [experiment.id for experiment in client.experiments(master.url)][:3] == ids[::-1]


def test_summary_of_metrics_comes_only_where_it_is_asked_for(master: Running) -> None:
    def ask(method: str, path: str, body: object = None) -> Any:
        return master.ask(method, path, body).json

    config = {"name": "test", "searcher": {"name": "single", "metric": "loss", "max_length": 1}}
    experiment = ask("POST", "experiments", {"config": config, "unmanaged": True})["experiment"]["id"]
    path = f"trials/{ask('POST', 'trials', {'experimentId': experiment})['trial']['id']}"
    ask("POST", f"{path}/start", {})
    report = {"trialRunId": 1, "stepsCompleted": 1, "metrics": {"avgMetrics": {"loss": 0.5}}}
    ask("POST", f"{path}/metrics", {"group": "validation", "metrics": report})
    assert ask("GET", path)["trial"]["summaryMetrics"]["validation"]["loss"]["count"] == 1
    for trial in (ask("GET", f"{path}?summary=false"), ask("PATCH", path, {"state": "STATE_COMPLETED"})):
        assert trial["trial"]["summaryMetrics"] == {}
        assert trial["trial"]["bestValidation"]["searcherMetric"] == 0.5
