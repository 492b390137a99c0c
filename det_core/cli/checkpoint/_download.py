"""``det-core checkpoint download``."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from det_core.cli._bar import bar
from det_core.cli._say import note, print_json, size
from det_core.cli.checkpoint._found import on_found

if TYPE_CHECKING:
    from det_core.client import Checkpoints

_EXAMPLES = """
examples:
  det-core checkpoint download latest model
  det-core checkpoint download 3f2a model --run 20261121-11
  det-core checkpoint download 3f2a91c4-… model --storage s3://bucket/prefix

Every byte is compared with the manifest. All is copied aside first: if the command fails, the folder is as it
was. What else is in the folder stays."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EXAMPLES.strip()
    parser.add_argument("DIR", help="the folder to copy into; made if need be")
    parser.set_defaults(run_command=on_found(run))


def run(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    """Download one checkpoint."""
    checkpoint = checkpoints[args.ID]
    folder = os.path.abspath(args.DIR)
    others = set(os.listdir(folder) if os.path.isdir(folder) else ()) - {p.split("/")[0] for p in checkpoint.resources}
    with bar(f"downloading {checkpoint.storage_id}", checkpoint.size) as advance:
        checkpoint.download(args.DIR, progress=advance)
    if others:
        note(f"{folder} was not empty: what else is in it stays, as {min(others)}")
    if args.json:
        told = {"storage_id": checkpoint.storage_id, "folder": folder, "verified": checkpoint.verified}
        print_json({**told, "size": checkpoint.size, "files": checkpoint.files})
        return 0
    how = "verified" if checkpoint.verified else "unverified: it has no manifest to compare with"
    content = f"{size(checkpoint.size)} in {checkpoint.files} file(s)"
    print(f"downloaded checkpoint {checkpoint.storage_id} to {folder}: {content}, {how}")
    return 0
