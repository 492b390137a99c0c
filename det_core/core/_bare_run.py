"""Bare runs: the chief opens the run directory, every rank uses it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from det_core._info import ClusterInfo
from det_core._json import equal_json
from det_core.backend import LocalBackend
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import on_chief
from det_core.core._run import (
    InitArguments,
    Run,
    changed_settings,
    describe_outcome,
    describe_start,
    how_to_resume,
    is_printable,
    is_script,
    script,
    to_recordable,
)
from det_core.journal import Journal, Record, RunFolder, RunRecord, read_run
from det_core.storage import Store, event_files_of_run, open_store, storage_without_secrets

MAX_UNLISTED = 5
"""Maximum number of unlisted checkpoints to try. After its store was moved, a run has none but unlisted ones."""
NO_SCRIPT = "python -c, a notebook or stdin"
NO_HANDLER_YET = "before its first should_preempt() call, until which a signal ends the process at once"
ASKED_TOO_SELDOM = (
    "after a signal to stop, before its next should_preempt() call: call it after every batch, or "
    "set a longer grace period (DET_CORE_GRACE, --grace)"
)


class _Opened(NamedTuple):
    """The run directory that the chief has opened, for all ranks."""

    run_id: str
    restart: int
    path: str
    latest_checkpoint: str | None
    steps_completed: int
    unlisted: tuple[str, ...]
    suspects: frozenset[str]
    remarks: tuple[str, ...]


def open_bare_run(
    distributed: DistributedContext, info: ClusterInfo | None, wanted: InitArguments, undo: ExitStack
) -> Run:
    """Start or resume a run, on all ranks.

    Args:
        distributed: the ranks of the run.
        info: the task in a cluster that is not a trial, or None.
        wanted: arguments of ``core.init()``.
        undo: closes opened components if a later step fails.

    Raises:
        RunNotFound: If no run has this ID. ``latest`` without a run of the name starts a new one.
        RunLocked: If another process writes the run.
        StorageError: If the checkpoint store cannot be used.
    """
    folders: list[RunFolder] = []  # the chief's
    earlier_config: dict[str, Any] = {}
    storage = None
    prefix = None
    if wanted.store is not None:
        storage = storage_without_secrets(wanted.checkpoint_storage, wanted.store)

    def open_on_chief() -> _Opened:
        if wanted.store is not None:  # before anything is created: its address may be misspelt
            wanted.check_store(wanted.store)
        folder, earlier = _open_folder(wanted)
        folders.append(folder)
        undo.callback(folder.release)
        if earlier is not None:
            earlier_config.update(earlier.last_settings("config"))
        return _begin_restart(folder, earlier, wanted, distributed.size, storage)

    opened = on_chief(distributed, "init", open_on_chief)
    path = Path(opened.path)
    if not folders and not path.is_dir():  # this rank is on another node, without the chief's file system
        path = wanted.environment.home / "runs" / opened.run_id
        path.mkdir(parents=True, exist_ok=True)
    store = wanted.store or _own_store(path)
    length = None
    units = None
    if wanted.max_length is not None:
        length, units = wanted.length
    if wanted.store is not None:
        prefix = event_files_of_run(opened.run_id)
    return Run(
        run_id=opened.run_id,
        restart=opened.restart,
        path=path,
        journal=Journal(path, run_id=opened.run_id, restart=opened.restart, rank=distributed.rank),
        journal_restart=opened.restart,
        backend=LocalBackend(
            path, length=length, searcher_metric=wanted.searcher_metric, smaller_is_better=wanted.smaller_is_better
        ),
        store=store,
        storage=storage,
        latest_checkpoint=opened.latest_checkpoint,
        steps_completed=opened.steps_completed,
        metric=wanted.searcher_metric,
        smaller_is_better=wanted.smaller_is_better,
        units=units,
        hparams=wanted.hparams,
        agent_id=os.uname().nodename,
        remarks=opened.remarks,
        start_notice=lambda start: _start_notice(opened, start),
        end_notice=lambda outcome, detail: _end_notice(opened.run_id, wanted, outcome, detail, distributed.size),
        release=folders[0].release if folders else lambda: None,
        tensorboard_prefix=prefix,
        unlisted_checkpoints=opened.unlisted,
        suspect_checkpoints=opened.suspects,
        info=info,
        earlier_config=earlier_config,
    )  # fmt: skip


def _begin_restart(
    folder: RunFolder, earlier: RunRecord | None, wanted: InitArguments, size: int, storage: Any
) -> _Opened:
    """Begin a start of the run in its directory, and find the checkpoints of earlier ones, on the chief."""
    start = describe_start(wanted.command)
    remarks = _remarks(earlier, wanted, start["argv"], size, storage)
    recorded: list[str] = []
    suspects: frozenset[str] = frozenset()
    if earlier is not None:
        recorded = _recorded(earlier)
        suspects = frozenset(str(r.get("storage_id")) for r in earlier.records("checkpoint_damaged"))
    folder.begin_restart(start)
    store = wanted.store or _own_store(folder.path)
    if wanted.store is None:
        wanted.check_store(store)
    latest = None
    steps = 0
    if folder.restart and (listed := store.list(folder.run_id)):
        latest = listed[-1].storage_id
        steps = listed[-1].steps_completed
    return _Opened(
        run_id=folder.run_id,
        restart=folder.restart,
        path=str(folder.path),
        latest_checkpoint=latest,
        steps_completed=steps,
        unlisted=_unlisted(recorded, latest),
        suspects=suspects,
        remarks=tuple(remarks),
    )


def cause_of_death(run: RunRecord) -> str:
    """Return the moment at which the last start of a run died, if its record explains the death; else ""."""

    def of_last(kind: str) -> list[Record]:
        return [record for record in run.records(kind) if record.restart == run.starts - 1]

    ended = {record.rank for record in of_last("run_end")}
    starts = [r for r in of_last("run_start") if r.get("notes_should_preempt")]
    if all(record.rank in ended for record in starts):
        return ""
    calls = of_last("should_preempt")
    if not calls:
        return NO_HANDLER_YET
    answered = {record.rank for record in calls if record.get("stopped")}
    requested = {record.rank for record in of_last("preempt_request")}
    if requested - answered - ended:
        return ASKED_TOO_SELDOM
    return ""


def _own_store(path: Path) -> Store:
    return open_store(None, default=path / "checkpoints")


def _open_folder(wanted: InitArguments) -> tuple[RunFolder, RunRecord | None]:
    """Find or create the directory of the run; return it with the record of earlier starts."""
    home = wanted.environment.home
    resume = wanted.resume or wanted.environment.resume
    if resume == "latest" and wanted.environment.resume:  # an ID from outside selects one of the script's runs
        resume = wanted.environment.resume
    folder: RunFolder | None = None
    if resume == "latest":
        if wanted.name is None and not is_script():
            raise ValueError(
                f"resume='latest' needs name=: this process is {NO_SCRIPT}, whose runs have no name of their own. Pass "
                "core.init(name=), or the ID of a run as resume="
            )
        folder = RunFolder.latest(home, _name(wanted))
    elif resume:
        folder = RunFolder.open(home, resume)
    if folder is not None:
        record = read_run(folder.path)
        if not record.starts:  # made by `det-core slurm submit`, which does not know the script's name for it
            folder.name = _name(wanted)
        return folder, record
    return RunFolder.create(home, name=_name(wanted)), None


def _recorded(run: RunRecord) -> list[str]:
    """Return the checkpoints that a run has committed and that were not deleted, oldest first."""
    deleted = {r.get("storage_id") for r in run.records("checkpoint_deleted") if not r.get("resources")}
    saved = [str(r["storage_id"]) for r in run.records("checkpoint") if "storage_id" in r]
    return [storage_id for storage_id in saved if storage_id not in deleted]


def _unlisted(recorded: Sequence[str], latest: str | None) -> tuple[str, ...]:
    """Return the checkpoints recorded after ``latest``, newest first; all of them if ``latest`` is None."""
    if latest is None:
        after = recorded
    elif latest in recorded:
        after = recorded[recorded.index(latest) + 1 :]
    else:
        after = []  # its writer died between the commit and the record, so nothing was recorded after it
    return tuple(after[-MAX_UNLISTED:][::-1])


def _name(wanted: InitArguments) -> str:
    name = wanted.name or script()
    if not is_printable(name):
        raise ValueError(f"the script's path {name!r} cannot be printed as the name of a run: pass core.init(name=)")
    return name


def _remarks(run: RunRecord | None, wanted: InitArguments, argv: Sequence[str], size: int, storage: Any) -> list[str]:
    """Return the differences of this start from earlier ones, as lines to print.

    Args:
        run: record of earlier starts, or None in a new run.
        wanted: arguments of this start.
        argv: command of this start.
        size: number of ranks of this start.
        storage: settings of its checkpoint store, without secrets; None for the run directory.
    """
    name = _name(wanted)
    if run is None:
        if not (wanted.resume or wanted.environment.resume):
            return []
        return [f"no earlier run named {name} in {wanted.environment.home}: starting a new one"]
    if not run.starts:
        return []
    head = f"run {run.run_id}"
    lines = []
    if run.name != name:
        lines.append(f"{head} was named {run.name} before, and is named {name} now")
    starts = run.records("run_start")
    if starts and starts[-1].get("size") != size:
        lines.append(f"{head} had {starts[-1].get('size')} rank(s) before, and has {size} now")
    if starts and not equal_json(starts[-1].get("storage"), storage):
        before = starts[-1].get("storage") or "its own directory"
        lines.append(
            f"{head} stored checkpoints in {before} before, and stores them in {storage or 'its own directory'} now"
        )
    if cause := cause_of_death(run):
        lines.append(f"{head} died {cause}")
    # A completed run may have nothing left to do, even with other arguments.
    how = "was started"
    if run.state == "completed":
        how = "had completed"
    command = shlex.join(argv) or NO_SCRIPT
    changes = []
    if (before := shlex.join(run.argv) or NO_SCRIPT) != command:
        changes.append(f"{head} {how}, as: {before}; resuming as: {command}")
    changed = changed_settings(run.last_settings("hparams"), to_recordable("hparams", wanted.hparams))
    if changed is not None:
        changes.append(f"{head} {how}, with the hparams {changed[0]}; resuming with {changed[1]}")
    if not changes and run.state == "completed":
        changes.append(f"{head} {how}, with the same command")
    return lines + changes


def _start_notice(run: _Opened, start: str | None) -> str:
    if run.restart == 0:
        return f"run {run.run_id} in {run.path}"
    checkpoint = "it has no checkpoint to start from"
    if start:
        checkpoint = f"newest checkpoint: {start}"
    return f"run {run.run_id} started again (restart {run.restart}) in {run.path}; {checkpoint}"


def _end_notice(run_id: str, wanted: InitArguments, outcome: str, detail: str, size: int) -> str:
    ending = describe_outcome(outcome, detail)
    if outcome in ("completed", "invalid_hp"):
        return f"run {run_id} {ending}; to look at it: det-core runs show {run_id}"
    how = how_to_resume(run_id, wanted.command)
    aim = "to resume it"
    if size > 1 and wanted.environment.command is None:  # only our own launchers pass on the command of the job
        aim += f" by the launcher of its {size} ranks"
    if "CheckpointCorrupt: " in detail:  # the same command alone would restore the same checkpoint, and fail
        remove = f"det-core checkpoint rm ID --run {run_id}"
        return f"run {run_id} {ending}; {aim} from an older checkpoint, remove the damaged: {remove}; then {how}"
    return f"run {run_id} {ending}; {aim}: {how}"
