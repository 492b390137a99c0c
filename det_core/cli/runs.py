"""``det-core runs`` and ``det-core sync``: runs that were recorded here without a master."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from det_core._json import encode_nonfinite
from det_core.cli._groups import Command, Group
from det_core.cli._options import (
    ABOUT_MASTERS,
    SHOWN,
    home_option,
    json_option,
    limit_of,
    limit_option,
    master_option,
    reach_master,
    yes_option,
)
from det_core.cli._output import (
    confirm,
    counted,
    error,
    note,
    number,
    print_facts,
    print_json,
    print_rows,
    print_table,
    progress_bar,
    say,
    when,
)
from det_core.cli.completion import complete_runs

if TYPE_CHECKING:
    from det_core.client import Run
    from det_core.client._master import Address
    from det_core.journal import Row

BAR_FROM_ROWS = 20_000
"""Rows from which on a terminal shows a progress bar."""
_EXPORT_EXAMPLES = """\
examples:
  det-core runs export latest --format csv > metrics.csv
  det-core runs export latest --format jsonl --group validation | jq .metrics.accuracy
  det-core runs export latest --format parquet --batches --output metrics.parquet

Each step occurs once: rows that were reported again after a resume are left out without --superseded. csv and parquet
have a column for each metric (nested ones with dots in their names); with --batches each batch is a line, numbered in
the column `batch`. jsonl keeps each row as it was reported, numbers that are not finite as strings, with their paths in
`nonfinite`."""

_SYNC_EXAMPLES = f"""\
examples:
  det-core sync                                        every run kept here that has ended
  det-core sync latest --master http://gpu1:8080

A run becomes an experiment with one trial there, with all that it has reported. After a resume, sync it again.

{ABOUT_MASTERS}"""

run_argument = click.argument("run", metavar="RUN", shell_complete=complete_runs)


@click.group("runs", cls=Group)
def command() -> None:
    """Look at runs that had no master. RUN is a run's ID, the beginning of one, or `latest`."""


@command.command("list")
@click.option("--name", help="Only runs of this name, or whose script has this file name.")
@limit_option
@json_option
@home_option
def list_runs(name: str | None, limit: int | None, as_json: bool, home: str | None) -> None:
    """List runs, newest first."""
    from det_core import client
    from det_core.client._runs import home_of

    runs = [r for r in client.runs(home) if name is None or name in (r.name, r.name.rsplit("/", 1)[-1])]
    shown = runs[: limit_of(limit, as_json)]
    if as_json:
        fields = ("run_id", "name", "state", "created", "restarts")
        print_json([{field: getattr(r, field) for field in fields} | {"path": str(r.path)} for r in shown])
        return
    rows = [(r.run_id, r.state, when(r.created), r.restarts, r.name) for r in shown]
    empty = f"no runs in {home_of(home)}"
    print_rows(("RUN", "STATE", "STARTED", "RESUMED", "NAME"), rows, empty=empty, hidden=len(runs) - len(shown))


@command.command()
@run_argument
@json_option
@home_option
def show(run: str, as_json: bool, home: str | None) -> None:
    """Show one run: state, metrics, checkpoints, how to resume it."""
    from det_core import client

    found = client.run(run, home)
    counts = {group: found.record.count_and_last(group) for group in found.groups()}
    last = {group: (count, row) for group, (count, row) in counts.items() if row is not None}
    if as_json:
        print_json(_as_json(found, last))
        return
    print_facts(_facts(found))
    if last:
        print("\nmetrics, the last of each group")
        print_table(("GROUP", "ROWS", "STEP", "METRIC", "VALUE"), _metric_rows(last))
    for group, (_, row) in last.items():
        if row.conflicts:
            where = f"{group}, step {row.steps_completed}"
            note(f"{where}: ranks reported different values for {', '.join(row.conflicts)}; shown is the lowest rank's")
    _print_checkpoints(found)


def _as_json(run: Run, last: dict[str, tuple[int, Row]]) -> dict[str, Any]:
    groups = {
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
    }
    fields = ("run_id", "name", "state", "status", "progress", "created", "restarts", "argv", "start", "detail",
              "hparams", "config", "settings", "metadata", "storage")  # fmt: skip
    return {field: getattr(run, field) for field in fields} | {
        "path": str(run.path),
        "resume": _resume_command(run),
        "groups": groups,
        "checkpoints": run.checkpoints(),
        "torn_lines": run.record.torn_lines,
    }


def _resume_command(run: Run) -> str:
    from det_core.core._run import how_to_resume

    return how_to_resume(run.run_id, shlex.join(run.argv))


def _facts(run: Run) -> Iterator[tuple[str, object]]:
    from det_core.client._table import spread
    from det_core.core._bare_run import cause_of_death
    from det_core.slurm import chain_of_run

    state = run.state
    if state == "died" and (cause := cause_of_death(run.record)):
        state = f"died ({cause})"
    yield "run", run.run_id
    yield "name", run.name
    yield "state", state
    yield "because", run.detail or None
    yield "started", when(run.created)
    yield "resumed", {0: "never", 1: "once"}.get(run.restarts, f"{run.restarts} times")
    yield "folder", run.path
    yield "command", shlex.join(run.argv) or None
    yield "directory", run.start.get("cwd") or None
    yield "host", run.start.get("host") or None
    if git := run.start.get("git"):
        changes = ", with changes" if git.get("dirty") else ""
        yield "commit", f"{git.get('commit')}{changes}"
    if chain := chain_of_run(run.path):
        jobs = ", ".join(dict.fromkeys(job.job for job in chain.jobs)) or "none has started"
        yield "slurm", f"{chain.end or 'goes on'}; jobs: {jobs}"
    if run.state == "running":
        yield "status", run.status  # of a run that has ended it is the last word before the end
    if run.progress is not None:
        yield "progress", f"{run.progress:.0%}"
    yield from _settings(run, "hparams")
    yield from _settings(run, "config")
    for key, value in spread(run.metadata).items():
        yield f"metadata.{key}", number(value)
    if torn := run.record.torn_lines:
        yield "torn lines", f"{torn} (left by a crash or a full disk; skipped)"
    if run.state not in ("running", "completed"):
        yield "to resume", _resume_command(run)


def _settings(run: Run, name: str) -> Iterator[tuple[str, object]]:
    """Yield settings; of each restart apart where they differ."""
    from det_core._json import equal_json
    from det_core.client._table import spread

    # The record has rows of every restart, whatever its settings were.
    of_restarts = [(f" (restart {restart})", settings) for restart, settings in run.record.settings(name).items()]
    last = run.record.last_settings(name)
    if all(equal_json(settings, last) for _, settings in of_restarts):
        of_restarts = [("", last)]
    for which, settings in of_restarts:
        for key, value in spread(settings).items():
            yield f"{name}.{key}{which}", number(value)
        if which and not settings:
            yield f"{name}{which}", "none"


def _metric_rows(last: dict[str, tuple[int, Row]]) -> Iterator[tuple[object, ...]]:
    from det_core.client._table import spread

    for group, (count, row) in last.items():
        head: tuple[object, ...] = (group, count, row.steps_completed)
        for key, value in spread(row.metrics).items():
            yield (*head, key, value)
            head = ("", "", "")  # a group is named once


def _print_checkpoints(run: Run) -> None:
    """Print a screenful of the run's checkpoints, the newest last."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        return
    place = f" in {run.storage}" if run.storage else ""
    print(f"\ncheckpoints{place}")
    if len(checkpoints) > SHOWN:
        print(f"({len(checkpoints) - SHOWN} older: det-core checkpoint list --run {run.run_id} --limit 0)")
    rows = []
    for c in checkpoints[-SHOWN:]:
        # The metadata may have been damaged; the record has the steps beside it, too.
        metadata = c.get("metadata")
        steps = (metadata if isinstance(metadata, dict) else c).get("steps_completed")
        rows.append((c.get("storage_id"), steps, when(c["time"]), c["restart"]))
    print_table(("STORAGE ID", "STEP", "SAVED", "RESTART"), rows)


@command.command(epilog=_EXPORT_EXAMPLES)
@run_argument
@click.option("--format", "-f", "kind", required=True, type=click.Choice(["csv", "jsonl", "parquet"]), help="Format.")
@click.option("--group", "-g", help="One metric group (default: all).")
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(dir_okay=False), help="File to write (default: stdout)."
)
@click.option("--batches", is_flag=True, help="Also batch metrics.")
@click.option("--superseded", is_flag=True, help="Also rows that were reported again after a resume.")
@home_option
def export(
    run: str,
    kind: str,
    group: str | None,
    output: str | None,
    batches: bool,
    superseded: bool,
    home: str | None,
) -> None:
    """Export a run's metrics as csv, jsonl or parquet."""
    from det_core import client

    found = client.run(run, home)
    if group is not None and group not in found.groups():
        groups = ", ".join(found.groups()) or "none"
        raise ValueError(f"run {found.run_id} has no group {group!r}; it has: {groups}")
    if kind == "parquet" and output is None and sys.stdout.isatty():
        raise ValueError("parquet is not for a terminal: name a file with --output")
    table = _Table(found, group, superseded, batches)
    write = {"csv": _write_csv, "jsonl": _write_jsonl, "parquet": _write_parquet}[kind]
    with click.open_file(output or "-", "wb", atomic=output is not None) as out:
        write(table, out)
    for key, steps in sorted(table.conflicts.items()):
        count = f"{len(steps)} step(s), first {min(steps)[1]}"
        note(f"ranks reported different values of {key} for {count}; the lowest rank's is kept")


class _Table:
    """Rows to export, which can be read several times.

    Attributes:
        conflicts: metrics of which ranks reported different values, with the restarts and steps where they did.
    """

    def __init__(self, run: Run, group: str | None, superseded: bool, batches: bool) -> None:
        self._run = run
        self._groups = run.groups() if group is None else [group]
        self.superseded = superseded
        self.batches = batches
        self.conflicts: dict[str, set[tuple[int, int]]] = {}

    def rows(self, title: str) -> Iterator[Row]:
        """Yield the rows; on a terminal, if there are many, beside a progress bar."""
        record = self._run.record
        total = sum(map(record.count, self._groups))
        with progress_bar(title, total, unit="rows", least=BAR_FROM_ROWS) as advance:
            for group in self._groups:
                for row in self._run.rows(group, superseded=self.superseded, batches=self.batches):
                    for key in row.conflicts:
                        self.conflicts.setdefault(f"{group}.{key}", set()).add((row.restart, row.steps_completed or 0))
                    advance(1)
                    yield row

    def flat_rows(self, title: str) -> Iterator[dict[str, Any]]:
        """Yield each row, and each of its batches, as columns."""
        from det_core.client._table import flatten_batches, flatten_row

        for row in self.rows(title):
            yield flatten_row(row, superseded=self.superseded, batches=self.batches)
            if self.batches:
                yield from flatten_batches(row, superseded=self.superseded)


def _write_csv(table: _Table, out: IO[bytes]) -> None:
    """Write a line for each row under a head; lists as JSON, what a row lacks empty."""
    # Read twice: a column that begins in the last row belongs into the head.
    columns = list(dict.fromkeys(name for row in table.flat_rows("reading") for name in row))
    # Without translation: csv writes its own line ends, on each platform the same.
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    try:
        write_csv(columns or ["group", "steps_completed"], table.flat_rows("writing"), text)
    finally:
        text.detach()  # else its destructor would close stdout


def write_csv(columns: list[str], rows: Iterable[dict[str, Any]], out: IO[str]) -> None:
    """Write rows as CSV with every digit of each number."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> Any:
    """Return a value as CSV has it."""
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)  # reads back as the same number
        return encode_nonfinite(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value


def _write_jsonl(table: _Table, out: IO[bytes]) -> None:
    for row in table.rows("writing"):
        out.write(row.line(superseded=table.superseded))


def _write_parquet(table: _Table, out: IO[bytes]) -> None:
    """Write a column for each metric: of one type if its values have one, else numbers as floats, or JSON."""
    from det_core._optional import require

    pyarrow = require("pyarrow", extra="data", purpose="export to parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="export to parquet")
    rows = list(table.flat_rows("reading"))

    def column(name: str) -> Any:
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        try:
            if not kinds & {list, dict}:
                return pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):  # a text and a number, or an int beyond 64 bits
            if kinds <= {int, float}:
                return pyarrow.array(_convert(values, float))
        return pyarrow.array(_convert(values, partial(json.dumps, ensure_ascii=False)))

    columns = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.table({name: column(name) for name in columns}), out)


def _convert(values: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


@command.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_runs)
@yes_option
@click.option("--folder-only", is_flag=True, help="Leave checkpoints and TensorBoard files in other storages.")
@home_option
def rm(runs: tuple[str, ...], yes: bool, folder_only: bool, home: str | None) -> None:
    """Delete runs: metrics, checkpoints and TensorBoard files, in every storage.

    One that still runs, or cannot be found, stops the command before anything is deleted.
    """
    from det_core import client
    from det_core.errors import RunLocked

    # By ID, as `latest` and its ID may both be given.
    found = list({r.run_id: r for r in (client.run(name, home) for name in runs)}.values())
    if live := [r.run_id for r in found if r.state == "running"]:
        raise RunLocked(f"{', '.join(live)}: still running; stop it first. Nothing was deleted")
    items = [f"{r.run_id}  {r.state}  {when(r.created)}  {r.name}" for r in found]
    question = f"delete {counted(len(found), 'run')}, with all that is in its folder?"
    if not folder_only:
        also = "".join(f", also in {place}" for place in sorted({_option_of(at) for r in found for at in r.storages}))
        question = f"delete {counted(len(found), 'run')}, with metrics, checkpoints and TensorBoard files{also}?"
    confirm(items, question, yes)
    for r in found:
        storages = [_option_of(storage) for storage in r.storages]  # read before the record is deleted
        say(f"deleted {client.delete_run(r.run_id, home, folder_only=folder_only)}")
        for storage in storages:
            if folder_only:
                seen = f"det-core checkpoint list --storage {shlex.quote(storage)} --run {r.run_id}"
                note(f"its checkpoints and TensorBoard files stay in {storage}; to see them: {seen}")
            else:
                say(f"deleted its checkpoints and TensorBoard files in {storage}")


def _option_of(storage: Any) -> str:
    """Return a storage as --storage takes it."""
    return storage if isinstance(storage, str) else json.dumps(storage)


@click.command("sync", cls=Command, epilog=_SYNC_EXAMPLES)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@json_option
@master_option
@home_option
def sync(runs: Sequence[str], as_json: bool, master: str | None, home: str | None) -> int:
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
