"""``det-core experiment describe``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from det_core._json import str_to_nonfinite
from det_core.cli._say import note, number, print_json, print_table, when
from det_core.cli._session import command_for, find, on_master

if TYPE_CHECKING:
    from det_core.client import Experiment, Master

SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object, with its configuration, trials and search")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Describe one experiment."""
    from det_core.cli.experiment._told import as_json, trial_json
    from det_core.cli.trial._list import print_trials, ranked

    experiment = find(master, args.EXPERIMENT)
    trials = ranked(experiment, experiment.trials())
    search = {} if experiment.info.get("unmanaged") else experiment.search()
    if args.json:
        more = {"config": experiment.config, "trials": [trial_json(t) for t in trials], "search": search}
        print_json({**as_json(experiment, result=True), **more})
        return 0
    for name, value in _facts(args, experiment):
        print(f"{name + ':':<13} {value}")
    if rungs := _rungs(experiment, search.get("rungs")):
        print("\nrungs")
        print_table(("BRACKET", "RUNG", "LENGTH", "ENDED", "PROMOTED", "UNDER WAY", "BEST"), rungs)
    if trials:
        print("\ntrials, the best first")
        print_trials(experiment, trials[:SHOWN])
        if len(trials) > SHOWN:
            note(f"{len(trials) - SHOWN} more: {command_for(args, 'trial', 'list', experiment.id)}")
    if experiment.best_checkpoint() is not None:
        told = command_for(args, "experiment", "download-checkpoint", experiment.id, "DIR")
        print(f"\nto download the best checkpoint: {told}")
    return 0


def _facts(args: argparse.Namespace, experiment: Experiment) -> list[tuple[str, str]]:
    from det_core.cli.experiment._told import settings, state_of_all, still_saves, why_failed

    info = experiment.info
    facts = [
        ("experiment", str(experiment.id)),
        ("name", experiment.name),
        ("state", ": ".join(filter(None, [state_of_all(experiment), still_saves(experiment)]))),
        ("progress", f"{experiment.progress:.0%}"),
        ("search", _search(experiment)),
        ("priority", str(info.get("priority"))),
        ("started", when(info.get("start_time") or 0.0)),
        ("ended", when(info.get("end_time") or 0.0)),
    ]
    if info.get("description"):
        facts.append(("description", str(info["description"])))
    if info.get("labels"):
        facts.append(("labels", ", ".join(info["labels"])))
    facts += why_failed(args, experiment)
    best = experiment.best_trial
    if best is not None and best.best_metric is not None:
        facts.append(("best", f"trial {best.id}, {experiment.metric} {number(best.best_metric)}"))
        facts.append(("best hparams", settings(best.hparams)))
    warnings = [*(info.get("config_warnings") or ()), *(info.get("remarks") or ())]
    facts += [("warning", str(warning)) for warning in warnings]
    return facts


def _search(experiment: Experiment) -> str:
    if not experiment.metric:
        return "none; it is run by others"
    return f"{experiment.info.get('searcher_type')} by {experiment.metric}, {_best_is(experiment)} is best"


def _best_is(experiment: Experiment) -> str:
    return "the smallest" if experiment.smaller_is_better else "the largest"


def _rungs(experiment: Experiment, brackets: Any) -> list[tuple[str, ...]]:
    """The rungs of a search as rows; a search without any, or with a form of its own, has none."""
    rows = []
    for bracket in brackets if isinstance(brackets, list) else ():
        for rung in bracket.get("rungs") or ():
            entries = rung["entries"]
            metrics = [float(str_to_nonfinite(entry["metric"])) for entry in entries if entry["metric"] is not None]
            best = (min if experiment.smaller_is_better else max)(metrics, default=None)
            promoted = sum(entry.get("state") == "promoted" for entry in entries)
            cells = (bracket["bracket"], rung["rung"], rung["length"], len(entries), promoted, rung["outstanding"])
            rows.append((*map(str, cells), "-" if best is None else number(best)))
    return rows
