"""``det-core checkpoint describe``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from det_core.cli._say import age, number, print_json, print_table, size, when
from det_core.cli.checkpoint._found import UNVERIFIED, as_json, on_found, states
from det_core.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints

SHOWN = 100
"""Files that a table shows."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(run_command=on_found(run))


def run(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """Describe one checkpoint."""
    checkpoint = checkpoints[args.ID]
    assert checkpoint.resources is not None  # which reads the manifest, or says what is wrong with it
    state = states(checkpoints, [checkpoint])[checkpoint.storage_id]
    try:
        metadata, problem = checkpoint.metadata, None
    except CheckpointCorrupt as e:
        metadata, problem = {}, str(e)
    path = None if checkpoint.path is None else str(checkpoint.path)
    if args.json:
        more = {"storage": checkpoints.root, "path": path, "metadata": metadata, "resources": checkpoint.resources}
        print_json({**as_json(checkpoint, state), **more, **({"problem": problem} if problem else {})})
    else:
        _print(checkpoint, state, [("folder", path) if path else ("storage", checkpoints.root)], metadata, problem)
    return 1 if problem else 0


def _print(c: Checkpoint, state: str, facts: list[Any], metadata: dict[str, Any], problem: str | None) -> None:
    told = f"{state} (written by others, without a manifest to compare with)" if state == UNVERIFIED else state
    about = [
        ("checkpoint", c.storage_id),
        ("state", told),
        ("run", c.run_id or "-"),
        ("restart", "-" if c.restart is None else str(c.restart)),
        ("steps", "-" if problem and c.run_id is None else str(c.steps_completed)),
        ("committed", "-" if c.time is None else f"{when(c.time)} ({age(c.time)} ago)"),
        *facts,
        ("size", f"{size(c.size)} in {c.files} file(s)"),
        *((f"metadata.{key}", number(value)) for key, value in metadata.items() if key != "steps_completed"),
    ]
    if problem:
        about.append(("metadata", problem))
    for name, value in about:
        print(f"{name + ':':<12} {value}")
    print("\nfiles")
    print_table(("SIZE", "PATH"), [(size(n), path) for path, n in list(c.resources.items())[:SHOWN]])
    if len(c.resources) > SHOWN:
        print(f"and {len(c.resources) - SHOWN} more; --json has all")
