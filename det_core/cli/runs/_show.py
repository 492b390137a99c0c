"""``det-core runs show``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from det_core.cli._say import note, number, print_json, print_table, when

if TYPE_CHECKING:
    from det_core.client import Run
    from det_core.journal import Row


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Show one run."""
    from det_core import client

    run = client.run(args.RUN, args.home)
    last = _last_rows(run)
    if args.json:
        print_json(_as_json(run, last))
    else:
        _print(run, last)
    return 0


def resume_command(run: Run) -> str:
    """What to type to go on with the run."""
    from det_core.core._run import how_to_resume

    return how_to_resume(run.run_id, shlex.join(run.argv))


def _last_rows(run: Run) -> dict[str, tuple[int, Row]]:
    """Group -> number of rows and the last of them."""
    last: dict[str, tuple[int, Row]] = {}
    for group in run.groups():
        count, row = run.record.count_and_last(group)
        if row is not None:
            last[group] = (count, row)
    return last


def _as_json(run: Run, last: dict[str, tuple[int, Row]]) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "status": run.status,
        "progress": run.progress,
        "created": run.created,
        "restarts": run.restarts,
        "path": str(run.path),
        "argv": run.argv,
        "start": run.start,
        "detail": run.detail,
        "hparams": run.hparams,
        "config": run.config,
        "settings": run.settings,
        "resume": resume_command(run),
        "metadata": run.metadata,
        "groups": {
            group: {
                "rows": count,
                "last": {
                    "steps_completed": row.steps_completed,
                    "time": row.time,
                    "metrics": row.metrics,
                    "conflicts": list(row.conflicts),
                },
            }
            for group, (count, row) in last.items()
        },
        "storage": run.storage,
        "checkpoints": run.checkpoints(),
        "torn_lines": run.record.torn_lines,
    }


def _print(run: Run, last: dict[str, tuple[int, Row]]) -> None:
    from det_core.client._table import spread

    facts = [
        ("run", run.run_id),
        ("name", run.name),
        ("state", _state(run)),
        ("started", when(run.created)),
        ("resumed", _times(run.restarts)),
        ("folder", str(run.path)),
        *_started(run),
        *_chain(run),
    ]
    if run.detail:
        facts.insert(3, ("because", run.detail))
    if run.status and run.state == "running":
        facts.append(("status", run.status))
    if run.progress is not None:
        facts.append(("progress", f"{run.progress:.0%}"))
    facts += [*_settings(run, "hparams"), *_settings(run, "config")]
    facts += [(f"metadata.{key}", number(value)) for key, value in spread(run.metadata).items()]
    if run.record.torn_lines:
        facts.append(("torn lines", f"{run.record.torn_lines} (left by a crash or a full disk; skipped)"))
    if run.state not in ("running", "completed"):
        facts.append(("to resume", resume_command(run)))
    width = max(12, *(len(name) + 1 for name, _ in facts))
    for name, value in facts:
        print(f"{name + ':':<{width}} {value}")
    if last:
        print("\nmetrics, the last of each group")
        print_table(("GROUP", "ROWS", "STEP", "METRIC", "VALUE"), list(_metric_lines(last)))
        for group, (_, row) in last.items():
            if row.conflicts:
                note(f"{group}, step {row.steps_completed}: ranks reported different values for {_keys(row.conflicts)}")
    if checkpoints := run.checkpoints():
        print(f"\ncheckpoints{f' in {run.storage}' if run.storage else ''}")
        rows = [
            (str(c.get("storage_id", "-")), str(_steps(c)), when(c["time"]), str(c["restart"])) for c in checkpoints
        ]
        print_table(("STORAGE ID", "STEP", "SAVED", "RESTART"), rows)


def _settings(run: Run, name: str) -> list[tuple[str, str]]:
    """Return settings as lines; those of each restart apart where they differ, as each made rows of its own."""
    from det_core._json import equal_json
    from det_core.client._table import spread

    of_restarts = run.record.settings(name)
    last = run.record.last_settings(name)
    if all(equal_json(settings, last) for settings in of_restarts.values()):
        return [(f"{name}.{key}", number(value)) for key, value in spread(last).items()]
    lines = []
    for restart, settings in of_restarts.items():
        values = spread(settings)
        lines += [(f"{name}.{key} (restart {restart})", number(value)) for key, value in values.items()]
        if not values:
            lines.append((f"{name} (restart {restart})", "none"))
    return lines


def _started(run: Run) -> list[tuple[str, str]]:
    """With what, where, and from which commit it was started last."""
    start = run.start
    facts = [("command", shlex.join(run.argv)), ("directory", start.get("cwd")), ("host", start.get("host"))]
    if git := start.get("git"):
        facts.append(("commit", f"{git.get('commit')}{', with changes' if git.get('dirty') else ''}"))
    return [(name, str(value)) for name, value in facts if value]


def _chain(run: Run) -> list[tuple[str, str]]:
    """Return the Slurm jobs that the run was submitted as, and how their chain ended."""
    from det_core.slurm import chain_of_run

    chain = chain_of_run(run.path)
    if chain is None:
        return []
    jobs = ", ".join(dict.fromkeys(job.job for job in chain.jobs)) or "none has started"
    return [("slurm", f"{chain.end or 'goes on'}; jobs: {jobs}")]


def _state(run: Run) -> str:
    from det_core.core._bare_run import cause_of_death

    cause = cause_of_death(run.record) if run.state == "died" else ""
    return f"{run.state} ({cause})" if cause else run.state


def _keys(conflicts: Iterable[str]) -> str:
    return f"{', '.join(conflicts)}; shown is the lowest rank's"


def _times(count: int) -> str:
    return "never" if count < 1 else "once" if count == 1 else f"{count} times"


def _metric_lines(last: dict[str, tuple[int, Row]]) -> list[tuple[str, str, str, str, str]]:
    from det_core.client._table import spread

    lines = []
    for group, (count, row) in last.items():
        head = (group, str(count), "-" if row.steps_completed is None else str(row.steps_completed))
        for key, value in spread(row.metrics).items():
            lines.append((*head, key, number(value)))
            head = ("", "", "")
    return lines


def _steps(checkpoint: dict[str, Any]) -> Any:
    metadata = checkpoint.get("metadata")
    steps = (metadata if isinstance(metadata, dict) else checkpoint).get("steps_completed")
    return "-" if steps is None else steps
