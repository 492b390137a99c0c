"""``det-core checkpoint verify``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from det_core.cli._bar import bar
from det_core.cli._say import error, note, print_json, size
from det_core.cli.checkpoint._found import COMPLETE, DAMAGED, UNVERIFIED, named, on_found

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints

_EXAMPLES = """
examples:
  det-core checkpoint verify latest
  det-core checkpoint verify --all --storage s3://bucket/prefix

Names each file that is damaged or missing, and goes on. The exit status is 1 if any checkpoint is damaged."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES.strip()
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run, or of the storage")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Verify checkpoints."""
    if bool(args.ID) == args.all:
        error("name the checkpoints to verify, or --all (and not both); `det-core checkpoint list` shows them")
        return 2
    return on_found(_verify)(args)


def _verify(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    from det_core.errors import CheckpointNotFound

    results = [_unreadable(*one) for one in checkpoints.damaged().items()] if args.all else []
    for result in results if not args.json else []:
        _print(result)
    for checkpoint in list(checkpoints) if args.all else named(checkpoints, args.ID):
        try:
            results.append(_verified(checkpoint, f"checkpoint {checkpoint.storage_id} in {checkpoints.root}: "))
        except CheckpointNotFound:
            note(f"{checkpoint.storage_id} was deleted meanwhile")
            continue
        if not args.json:
            _print(results[-1])
    if args.json:
        print_json(results)
    elif not results:
        print(f"no checkpoints in {checkpoints.root}")
    damaged = any(result["state"] == DAMAGED for result in results)
    if damaged and not args.json:
        note("`det-core checkpoint rm` a damaged checkpoint, and its run resumes from the one before")
    return int(damaged)


def _verified(checkpoint: Checkpoint, where: str) -> dict[str, Any]:
    with bar(f"verifying {checkpoint.storage_id}", checkpoint.size) as advance:
        problems = [problem.removeprefix(where) for problem in checkpoint.verify(progress=advance)]
    state = DAMAGED if problems else COMPLETE if checkpoint.verified else UNVERIFIED
    content = {"size": checkpoint.size, "files": checkpoint.files}
    return {"storage_id": checkpoint.storage_id, "state": state, **content, "problems": problems}


def _unreadable(storage_id: str, problem: str) -> dict[str, Any]:
    """The result for one whose manifest cannot be used."""
    return {"storage_id": storage_id, "state": DAMAGED, "size": None, "files": None, "problems": [problem]}


def _print(result: dict[str, Any]) -> None:
    content = "" if result["size"] is None else f"{size(result['size'])} in {result['files']} file(s)"
    told = {
        COMPLETE: f"whole: {content}",
        UNVERIFIED: f"unverified: {content} can be read; it has no manifest to compare with",
        DAMAGED: f"damaged: {len(result['problems'])} problem(s)",
    }
    print(f"{result['storage_id']}  {told[result['state']]}")
    for problem in result["problems"]:
        print(f"  {problem}")
