"""Downloading a checkpoint into the folder that a person names."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from det_core.cli._bar import bar
from det_core.cli._say import note, print_json, size
from det_core.cli._signals import interrupted_by_sigterm

if TYPE_CHECKING:
    from det_core.client import Checkpoint


def download(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    """Copy it into ``args.DIR``, and say what is there now."""
    folder = os.path.abspath(args.DIR)
    there = set(os.listdir(folder) if os.path.isdir(folder) else ())
    own = {path.split("/")[0] for path in checkpoint.resources}
    with interrupted_by_sigterm(), bar(f"downloading {checkpoint.storage_id}", checkpoint.size) as advance:
        checkpoint.download(args.DIR, progress=advance)
    for what, names in (("replaced", there & own), ("there still, and not of this checkpoint", there - own)):
        if names:
            note(f"{folder} was not empty; {what}: {', '.join(sorted(names)[:5])}{', …' if len(names) > 5 else ''}")
    if args.json:
        told = {"storage_id": checkpoint.storage_id, "folder": folder, "verified": checkpoint.verified}
        print_json({**told, "size": checkpoint.size, "files": checkpoint.files})
        return 0
    how = "verified" if checkpoint.verified else "unverified: it has no manifest to compare with"
    content = f"{size(checkpoint.size)} in {checkpoint.files} file(s)"
    print(f"downloaded checkpoint {checkpoint.storage_id} to {folder}: {content}, {how}")
    return 0
