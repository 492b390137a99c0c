"""``det-core sync``: runs that have ended to a master."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import Command
from det_core.cli._options import ABOUT_MASTERS, home_option, json_option, master_option, reach_master
from det_core.cli._output import error, note, print_json, progress_bar, say
from det_core.cli.completion import complete_runs

if TYPE_CHECKING:
    from det_core.client._address import Address

_EXAMPLES = f"""\
examples:
  det-core sync                                        every run kept here that has ended
  det-core sync latest --master http://gpu1:8080

A run becomes an experiment with one trial there, with all that it has reported. After a resume, sync it again.

{ABOUT_MASTERS}"""


@click.command("sync", cls=Command, epilog=_EXAMPLES)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@json_option
@master_option
@home_option
def command(runs: Sequence[str], as_json: bool, master: str | None, home: str | None) -> int:
    """Send runs to a master: by default all here that have ended. RUN is an ID, the beginning of one, or `latest`."""
    from det_core import client
    from det_core.errors import DetCoreError, MasterUnreachable

    found = [client.run(name, home) for name in runs]
    if not runs:
        # Oldest first, so that the master's numbers are in their order.
        found = [run for run in client.runs(home)[::-1] if run.state != "running"]
    if not found:
        note("no run here has ended")
        return 0
    address = reach_master(master, home)
    views = []
    failed = False
    for run in {r.run_id: r for r in found}.values():
        try:
            views.append(_sync(run.path, address, as_json))
        except MasterUnreachable:
            raise
        except (DetCoreError, OSError) as e:  # of this run; the others can be sent
            failed = True
            error(f"run {run.run_id}: {e}")
    if as_json:
        print_json(views)
    return int(failed or any(view["refused"] for view in views))


def _sync(folder: Path, address: Address, as_json: bool) -> dict[str, Any]:
    from det_core.backend._sync import sync_run

    total = sum(path.stat().st_size for path in folder.glob("journal-*.jsonl"))
    with progress_bar(f"syncing {folder.name}", total) as advance:
        synced = sync_run(
            folder,
            address.url,
            address.token,
            cert_file=address.certificate,
            cert_name=address.certificate_name,
            on_bytes=advance,
        )
    if not as_json:
        what = f"{synced.records} new record(s)" if synced.records else "nothing new"
        say(f"run {folder.name}: {what}, experiment {synced.experiment_id}, trial {synced.trial_id}")
        for line in synced.refused:
            note(f"rejected: {line}")
    return {
        "run_id": folder.name,
        "experiment_id": synced.experiment_id,
        "trial_id": synced.trial_id,
        "records": synced.records,
        "refused": list(synced.refused),
        "state": synced.state,
    }
