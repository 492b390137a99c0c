"""``det-core checkpoint download``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from det_core.cli._download import download
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
    return download(checkpoints[args.ID], args)
