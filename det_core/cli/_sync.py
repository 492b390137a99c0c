"""``det-core sync``: bare runs to a master."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from det_core.cli._bar import bar
from det_core.cli._say import error, note, print_json
from det_core.cli._session import ABOUT_MASTERS, master_options, reached

if TYPE_CHECKING:
    from det_core.client._address import Address

_EXAMPLES = """\
examples:
  det-core sync                                        every run kept here
  det-core sync latest --master http://gpu1:8080

A run becomes an experiment with one trial there, with all that it has reported. Doing it again brings what is new."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = f"{_EXAMPLES}\n\n{ABOUT_MASTERS}"
    parser.add_argument(
        "RUN", nargs="*", help="a run's id, the beginning of one, or `latest` (default: all runs kept here)"
    )
    parser.add_argument("--json", action="store_true", help="a list of objects")
    master_options(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Bring runs to a master; one that fails does not keep the others."""
    from det_core import client
    from det_core.errors import DetCoreError, MasterUnreachable

    runs = [client.run(name, args.home) for name in args.RUN] if args.RUN else client.runs(args.home)[::-1]
    if not runs:
        note("no runs are kept here")
        return 0
    address = reached(args)
    told, failed = [], 0
    for one in {r.run_id: r for r in runs}.values():
        try:
            told.append(_sync(one.path, address, args.json))
        except MasterUnreachable:
            raise
        except (DetCoreError, OSError) as e:
            failed += 1
            error(f"run {one.run_id}: {e}")
    if args.json:
        print_json(told)
    return int(failed > 0 or any(t["refused"] for t in told))


def _sync(folder: Path, address: Address, quiet: bool) -> dict[str, object]:
    from det_core.backend.rest import sync_run

    total = sum(path.stat().st_size for path in folder.glob("journal-*.jsonl"))
    with bar(f"syncing {folder.name}", total) as advance:
        done = 0

        def progress(arrived: int, _total: int) -> None:
            nonlocal done
            advance(arrived - done)
            done = arrived

        synced = sync_run(
            folder,
            address.url,
            address.token,
            cert_file=address.certificate,
            cert_name=address.certificate_name,
            progress=progress,
        )
    if not quiet:
        what = f"{synced.records} new record(s)" if synced.records else "nothing new"
        print(f"run {folder.name}: {what}, experiment {synced.experiment_id}, trial {synced.trial_id}")
        for line in synced.refused:
            note(f"not taken: {line}")
    return {
        "run_id": folder.name,
        "experiment_id": synced.experiment_id,
        "trial_id": synced.trial_id,
        "records": synced.records,
        "refused": list(synced.refused),
        "state": synced.state,
    }
