"""Searches that run elsewhere (§12.8): what they are told, and what they send back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.master._errors import Invalid, WrongState
from det_core.master.service._access import experiment_row, know_experiment, live_experiment
from det_core.master.service._views import EventView
from det_core.master.store import key_values, searcher_events
from det_core.search import Close, Create, Posted, SetProgress, Shutdown, TrainTo

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._actor import Transaction
    from det_core.master.service._hub import Hub
    from det_core.master.service._live import LiveExperiment
    from det_core.master.store.searcher_events import SearcherEventRow
    from det_core.search import Action

SEED = 42
"""Of every trial that such a search creates."""


def _answered(experiment_id: int) -> str:
    return f"searcher events answered of {experiment_id}"


async def events(hub: Hub, experiment_id: int, timeout: float) -> list[EventView]:
    """The events that were not answered yet."""
    row = await experiment_row(hub, experiment_id)
    _check_custom(experiment_id, row.config["searcher"])
    with hub.news.watch(("search", experiment_id)) as watch:
        while True:
            experiment = hub.live.experiments.get(experiment_id)
            if experiment is None or experiment.state.value != "ACTIVE":
                state = (await experiment_row(hub, experiment_id)).state
                return [EventView(id=-1, event={"experimentInactive": {"experimentState": f"STATE_{state}"}})]
            found = await hub.store.read(lambda conn: _open(conn, experiment_id))
            if found or hub.news.stopped or not await watch.wait(timeout):
                return found


def _open(conn: Connection, experiment_id: int) -> list[EventView]:
    answered = key_values.get(conn, _answered(experiment_id), -1)
    views = [_view(row) for row in searcher_events.after(conn, experiment_id, answered)]
    return [view for view in views if view["event"]]


def _view(row: SearcherEventRow) -> EventView:
    show = _VIEWS.get(row.event["kind"])
    return EventView(id=row.ordinal, event={} if show is None else show(row.event))


def _exited(event: Mapping[str, Any]) -> dict[str, Any]:
    request_id, reason = event["request_id"], event["reason"]
    if reason == "completed":
        return {"trialClosed": {"requestId": request_id}}
    words = {"errored": "ERRORED", "invalid_hp": "INVALID_HP", "canceled": "USER_CANCELED"}
    return {"trialExitedEarly": {"requestId": request_id, "exitedReason": f"EXITED_REASON_{words[reason]}"}}


_VIEWS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "started": lambda e: {"initialOperations": {}},
    "trial_created": lambda e: {"trialCreated": {"requestId": e["request_id"]}},
    "completed": lambda e: {
        "validationCompleted": {
            "requestId": e["request_id"],
            "metric": e["metric"],
            "validateAfterLength": str(e["length"]),
        }
    },
    "progress": lambda e: {"trialProgress": {"requestId": e["request_id"], "partialUnits": e["units"]}},
    "exited": _exited,
}


async def operations(hub: Hub, experiment_id: int, triggered_by: int | None, sent: Sequence[Mapping[str, Any]]) -> None:
    """Take the decisions of a search that runs elsewhere."""
    actions = tuple(_action(number, operation) for number, operation in enumerate(sent))
    answered = await hub.store.read(lambda conn: key_values.get(conn, _answered(experiment_id), -1))
    if triggered_by is not None and 0 <= triggered_by <= answered:
        return  # the same answer once more
    await know_experiment(hub, experiment_id)

    def command(tx: Transaction) -> None:
        experiment = live_experiment(hub, experiment_id)
        _check_custom(experiment_id, experiment.spec.searcher)
        _check_known(experiment, actions)
        if triggered_by is not None:
            if triggered_by >= experiment.events:
                raise Invalid(f"experiment {experiment_id} has no event {triggered_by} yet")
            tx.write(key_values.put, _answered(experiment_id), triggered_by)
        experiment.pending.append(Posted(actions))
        hub.live.touch(experiment)

    await hub.actor.do(command)


def _check_custom(experiment_id: int, searcher: Mapping[str, Any]) -> None:
    if searcher["name"] != "custom" or searcher.get("class"):
        raise WrongState(f"experiment {experiment_id}: its search decides by itself; no operations can be sent to it")


def _check_known(experiment: LiveExperiment, actions: Sequence[Action]) -> None:
    """Refuse what is about trials that are not there, before anything of it is done."""
    known = set(experiment.known)
    for action in actions:
        if isinstance(action, Create):
            if action.request_id in known:
                raise Invalid(f"experiment {experiment.id}: there is a trial {action.request_id} already")
            known.add(action.request_id)
        elif isinstance(action, (TrainTo, Close)) and action.request_id not in known:
            raise Invalid(f"experiment {experiment.id} has no trial {action.request_id}")


def _action(number: int, operation: Mapping[str, Any]) -> Action:
    """An operation as it comes on the wire."""
    try:
        if (made := operation.get("createTrial")) is not None:
            hparams = json.loads(made.get("hyperparams") or "{}")
            return Create(str(made["requestId"]), dict(hparams), SEED)
        if (train := operation.get("trialOperation")) is not None:
            after = train["validateAfter"]
            return TrainTo(str(after["requestId"]), int(after["length"]))
        if (closed := operation.get("closeTrial")) is not None:
            return Close(str(closed["requestId"]))
        if (end := operation.get("shutDown")) is not None:
            return Shutdown(failure=bool(end.get("failure")), cancel=bool(end.get("cancel")))
        if (progress := operation.get("setSearcherProgress")) is not None:
            return SetProgress(float(progress["progress"]))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise Invalid(f"searcherOperations[{number}] cannot be used: {type(e).__name__}: {e}") from None
    raise Invalid(f"searcherOperations[{number}] is none that is known: it has {', '.join(operation) or 'nothing'}")
