"""What a command line names: the store, checkpoints in it; and how one is told as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints

COMPLETE, IN_USE, DAMAGED, UNVERIFIED = "complete", "in use", "damaged", "unverified"
TOGETHER = 8
"""Manifests that are read at a time."""


def on_found(command: Callable[[argparse.Namespace, Checkpoints], int]) -> Callable[[argparse.Namespace], int]:
    """Have ``command`` called with the checkpoints that ``--storage``, ``--run`` and ``--home`` name."""

    def run(args: argparse.Namespace) -> int:
        from det_core import client

        with client.checkpoints(storage=args.storage, run=args.run, home=args.home) as checkpoints:
            return command(args, checkpoints)

    return run


def named(checkpoints: Checkpoints, ids: list[str]) -> list[Checkpoint]:
    """Each that is named, once."""
    return list({c.storage_id: c for c in (checkpoints[name] for name in ids)}.values())


def states(checkpoints: Checkpoints, several: list[Checkpoint]) -> dict[str, str]:
    """The state of each by its id, but for one that goes meanwhile. Reads their manifests, several at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from det_core.errors import CheckpointCorrupt, CheckpointNotFound

    in_use = checkpoints.in_use

    def state(checkpoint: Checkpoint) -> str | None:
        try:
            verified = checkpoint.verified
        except CheckpointCorrupt:
            return DAMAGED
        except CheckpointNotFound:
            return None
        if checkpoint.storage_id in in_use:
            return IN_USE
        return COMPLETE if verified else UNVERIFIED

    with ThreadPoolExecutor(TOGETHER) as pool:
        found = zip((c.storage_id for c in several), pool.map(state, several), strict=True)
        return {storage_id: state for storage_id, state in found if state is not None}


def as_json(checkpoint: Checkpoint, state: str) -> dict[str, Any]:
    """A checkpoint without its files."""
    readable = state != DAMAGED
    return {
        "storage_id": checkpoint.storage_id,
        "run_id": checkpoint.run_id,
        "restart": checkpoint.restart,
        "steps_completed": checkpoint.steps_completed,
        "time": checkpoint.time,
        "size": checkpoint.size if readable else None,
        "files": checkpoint.files if readable else None,
        "state": state,
    }
