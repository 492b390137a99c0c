"""``det-core trial describe``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from det_core.cli._say import number, print_json, print_table, size, when
from det_core.cli._session import on_master
from det_core.cli.trial._found import find

if TYPE_CHECKING:
    from det_core.client import Master, Trial


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=on_master(run))


def run(args: argparse.Namespace, master: Master) -> int:
    """Describe one trial."""
    from det_core.cli.experiment._told import trial_json

    trial = find(master, args.TRIAL)
    checkpoints = [c for c in trial.checkpoints() if c["state"] != "DELETED"]
    if args.json:
        print_json({**trial_json(trial), "checkpoints": [_checkpoint_json(c) for c in checkpoints]})
        return 0
    for name, value in _facts(trial):
        print(f"{name + ':':<18} {value}")
    if checkpoints:
        print("\ncheckpoints")
        rows = [
            (c["uuid"], str(c["steps_completed"]), size(int(c["size"])), when(c["report_time"])) for c in checkpoints
        ]
        print_table(("CHECKPOINT", "STEP", "SIZE", "SAVED"), rows)
    return 0


def _facts(trial: Trial) -> list[tuple[str, str]]:
    from det_core.cli.experiment._told import state_of

    info = trial.info
    facts = [
        ("trial", str(trial.id)),
        ("experiment", str(trial.experiment_id)),
        ("state", state_of(trial) + (" (for the search)" if info.get("parked") else "")),
        *([("killed by", when(info["stop_by_time"]))] if info.get("stop_by_time") else []),
        ("started", when(info.get("start_time") or 0.0)),
        ("ended", when(info.get("end_time") or 0.0)),
        ("restarts", str(trial.restarts)),
        ("steps completed", str(trial.steps_completed)),
    ]
    if info.get("runner_state"):
        facts.append(("status", str(info["runner_state"])))
    if trial.error:
        facts.append(("error", trial.error))
    facts += [(f"hparams.{key}", number(value)) for key, value in sorted(trial.hparams.items())]
    for name, validation in (("latest", trial.latest_validation), ("best", trial.best_validation)):
        if validation:
            metrics = ", ".join(f"{key} {number(value)}" for key, value in sorted(validation["metrics"].items()))
            facts.append((f"{name} validation", f"step {validation.get('total_batches')}: {metrics}"))
    return facts


def _checkpoint_json(checkpoint: dict[str, Any]) -> dict[str, Any]:
    keys = ("uuid", "state", "steps_completed", "report_time", "metadata")
    return {key: checkpoint.get(key) for key in keys} | {"size": int(checkpoint["size"])}
