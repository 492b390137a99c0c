"""A search that runs outside of the master, with nothing but requests, and trials that are processes (§12.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.real_master import RealMaster
from support.recipe import OURS, config, files

ONE, TWO = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
RATES = {ONE: 0.5, TWO: 0.25}


def train_to(request: str, length: int) -> dict[str, Any]:
    """Return an operation for a trial."""
    return {"trialOperation": {"validateAfter": {"requestId": request, "length": str(length)}}}


class Search:
    """Trains two trials to 2, and the better one of them to 4.

    Attributes:
        seen: the kinds of events that came, in their order.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._metrics: dict[str, float] = {}
        self._closed = 0

    def decide(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the actions for an event."""
        (kind,) = set(event) - {"id"}
        told = event[kind]
        self.seen.append(kind)
        if kind == "initialOperations":
            creations = [
                {"createTrial": {"requestId": request, "hyperparams": f'{{"lr": {lr}}}'}}
                for request, lr in RATES.items()
            ]
            return [*creations, *(train_to(request, 2) for request in RATES)]
        if kind == "validationCompleted":
            return self._validated(told)
        if kind == "trialClosed":
            self._closed += 1
            if self._closed == 2:
                return [{"setSearcherProgress": {"progress": 1.0}}, {"shutDown": {"cancel": False, "failure": False}}]
        return []

    def _validated(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        if told["validateAfterLength"] == "4":
            return [{"closeTrial": {"requestId": told["requestId"]}}]
        self._metrics[told["requestId"]] = told["metric"]
        if len(self._metrics) < 2:
            return []
        best, worst = sorted(self._metrics, key=lambda request: self._metrics[request])
        return [train_to(best, 4), {"closeTrial": {"requestId": worst}}]


def test_a_search_from_its_first_event_to_its_shutdown(real: RealMaster, tmp_path: Path) -> None:
    settings = config(f"older.py {OURS} 0.37", tmp_path, {"name": "custom", "unit": "batches"})
    number = real.create(settings, files())
    search, state = Search(), None
    while state is None:
        for event in real.get(f"experiments/{number}/searcher_events")["searcherEvents"]:
            if event["id"] == -1:
                state = event["experimentInactive"]["experimentState"]
                break
            body = {"experimentId": number, "triggeredByEvent": event, "searcherOperations": search.decide(event)}
            for _ in range(2):  # the answer to the first one was lost
                assert real.post(f"experiments/{number}/searcher_operations", body) == {}
    real.until(number, "STATE_COMPLETED")
    assert state in ("STATE_COMPLETED", "STATE_STOPPING_COMPLETED")
    assert search.seen[0] == "initialOperations"
    counts = {kind: search.seen.count(kind) for kind in set(search.seen) - {"trialProgress"}}
    assert counts == {"initialOperations": 1, "trialCreated": 2, "validationCompleted": 3, "trialClosed": 2}
    trials = {t["requestId"]: t for t in real.trials(number)}
    assert {request: t["hparams"] for request, t in trials.items()} == {r: {"lr": lr} for r, lr in RATES.items()}
    assert {request: t["totalBatchesProcessed"] for request, t in trials.items()} == {ONE: 2, TWO: 4}
    assert {t["trialSeed"] for t in trials.values()} == {42}
    assert trials[TWO]["trialRunId"] in (1, 2), "2 where it had exited before the other was measured"


def test_what_such_a_search_may_not_do(real: RealMaster, tmp_path: Path) -> None:
    number = real.create(config("hold.py .", tmp_path, {"name": "custom"}), files())
    path = f"experiments/{number}/searcher_operations"
    create = {"createTrial": {"requestId": ONE, "hyperparams": "{}"}}
    for operations in (
        [train_to(TWO, 1)],
        [create, create],
        [{"dance": {}}],
        [{"createTrial": {"requestId": ONE, "hyperparams": "{"}}],
        [{"createTrial": {}}],
        [create, train_to(ONE, 1), {"closeTrial": {"requestId": TWO}}],
    ):
        refused = real.ask("POST", path, {"searcherOperations": operations})
        assert refused.status_code == 400, operations
    early = {"triggeredByEvent": {"id": 17}, "searcherOperations": []}
    assert real.ask("POST", path, early).status_code == 400
    assert real.trials(number) == [], "nothing of it was done"
    real.post(path, {"searcherOperations": [{"shutDown": {"cancel": True, "failure": False}}]})
    real.until(number, "STATE_CANCELED")
    (over,) = real.get(f"experiments/{number}/searcher_events")["searcherEvents"]
    assert (over["id"], over["experimentInactive"]) == (-1, {"experimentState": "STATE_CANCELED"})
    assert real.ask("POST", path, {"searcherOperations": [create]}).status_code == 400


def test_other_searches_take_no_operations(real: RealMaster, tmp_path: Path) -> None:
    number = real.create(config("hold.py .", tmp_path, {"name": "single", "max_length": 1}), files(), activate=False)
    assert real.ask("POST", f"experiments/{number}/searcher_operations", {"searcherOperations": []}).status_code == 400
    assert real.ask("GET", f"experiments/{number}/searcher_events").status_code == 400
