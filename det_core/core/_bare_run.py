"""A run without a master: its folder opened by the chief and known to every rank, its first and last line."""

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
"""Checkpoints that are looked for although the store does not list them: of a store that was moved it lists none."""
NO_SCRIPT = "python -c, a notebook or stdin"
NO_HANDLER_YET = "it had not called should_preempt() yet, and before that a signal ends a process at once"
ASKED_TOO_SELDOM = (
    "it had got a signal to stop, and was killed before its next should_preempt() call: call that after every batch, "
    "or set a longer grace period (DET_CORE_GRACE, --grace)"
)


class _Opened(NamedTuple):
    """What the chief has opened, for all ranks."""

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
    """Start a run, or take up the one that was asked for, on all ranks together.

    Args:
        distributed: the ranks of the run.
        info: what a cluster says of this task, which is no trial.
        wanted: which run.
        undo: closes what was opened, if the context cannot be made after all.

    Raises:
        RunNotFound: there is no run of that id. ``latest`` without any run of that name starts a new one.
        RunLocked: another process writes that run.
        StorageError: checkpoints cannot be kept where they are to go.
    """
    chiefs: list[RunFolder] = []
    earlier_config: dict[str, Any] = {}
    storage = None if wanted.store is None else storage_without_secrets(wanted.checkpoint_storage, wanted.store)

    def open_on_chief() -> _Opened:
        if wanted.store is not None:  # before anything is made: its address may be misspelt
            wanted.check_store(wanted.store)
        folder, earlier = _open_folder(wanted)
        chiefs.append(folder)
        undo.callback(folder.release)
        start = describe_start(wanted.command)
        remarks = _remarks(earlier, wanted, start["argv"], distributed.size, storage)
        recorded: list[str] = []
        suspects: frozenset[str] = frozenset()
        if earlier is not None:
            recorded = _recorded(earlier)
            suspects = frozenset(str(r.get("storage_id")) for r in earlier.records("checkpoint_damaged"))
            earlier_config.update(earlier.last_settings("config"))
        folder.begin_restart(start)
        store = wanted.store or _own_store(folder.path)
        if wanted.store is None:
            wanted.check_store(store)
        kept = store.list(folder.run_id) if folder.restart else []
        latest, steps = (kept[-1].storage_id, kept[-1].steps_completed) if kept else (None, 0)
        unlisted = _unlisted(recorded, latest)
        return _Opened(
            folder.run_id, folder.restart, str(folder.path), latest, steps, unlisted, suspects, tuple(remarks)
        )

    opened = on_chief(distributed, "init", open_on_chief)
    path = Path(opened.path)
    if not chiefs and not path.is_dir():  # on another machine, without its file system
        path = wanted.environment.home / "runs" / opened.run_id
        path.mkdir(parents=True, exist_ok=True)
    store = wanted.store or _own_store(path)
    length, units = wanted.length if wanted.max_length is not None else (None, None)
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
        release=chiefs[0].release if chiefs else lambda: None,
        tensorboard_prefix=None if wanted.store is None else event_files_of_run(opened.run_id),
        unlisted_checkpoints=opened.unlisted,
        suspect_checkpoints=opened.suspects,
        info=info,
        earlier_config=earlier_config,
    )  # fmt: skip


def cause_of_death(run: RunRecord) -> str:
    """Return why the last start of a run ended without a word, as far as its record tells; empty: it does not."""

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
    return ASKED_TOO_SELDOM if requested - answered - ended else ""


def _own_store(path: Path) -> Store:
    return open_store(None, default=path / "checkpoints")


def _open_folder(wanted: InitArguments) -> tuple[RunFolder, RunRecord | None]:
    """Find or make the folder of the run, and return it with what earlier starts have recorded there."""
    home = wanted.environment.home
    resume = wanted.resume or wanted.environment.resume
    if resume == "latest" and wanted.environment.resume:  # an ID from outside says which of the script's runs
        resume = wanted.environment.resume
    folder: RunFolder | None = None
    if resume == "latest":
        if wanted.name is None and not is_script():
            raise ValueError(
                f"resume='latest' needs name=: this process is {NO_SCRIPT}, whose runs have no name of their own. Pass "
                "core.init(name=), or the id of a run as resume="
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
    """Return the checkpoints that a run has committed and nobody has deleted, oldest first."""
    gone = {r.get("storage_id") for r in run.records("checkpoint_deleted") if not r.get("resources")}
    saved = [str(r["storage_id"]) for r in run.records("checkpoint") if "storage_id" in r]
    return [storage_id for storage_id in saved if storage_id not in gone]


def _unlisted(recorded: Sequence[str], latest: str | None) -> tuple[str, ...]:
    """Return the checkpoints recorded after ``latest``, newest first; all, if there is none that is listed."""
    if latest is None:
        after = recorded
    elif latest in recorded:
        after = recorded[recorded.index(latest) + 1 :]
    else:  # its writer died before it was recorded, so nothing was recorded after it
        after = []
    return tuple(after[-MAX_UNLISTED:][::-1])


def _name(wanted: InitArguments) -> str:
    name = wanted.name or script()
    if not is_printable(name):
        raise ValueError(f"the script's path {name!r} cannot be printed as the name of a run: pass core.init(name=)")
    return name


def _remarks(run: RunRecord | None, wanted: InitArguments, argv: Sequence[str], size: int, storage: Any) -> list[str]:
    """Return how this start of a run differs from the ones before, as lines for a person.

    Args:
        run: what earlier starts have recorded; None: this is the first.
        wanted: the arguments of this start.
        argv: its command.
        size: its ranks.
        storage: where its checkpoints go, without secrets; None: into its own folder.
    """
    name = _name(wanted)
    if run is None:
        resume = wanted.resume or wanted.environment.resume
        return [f"there is no earlier run named {name} in {wanted.environment.home}: starting a new one"] * bool(resume)
    if not run.starts:
        return []
    head = f"run {run.run_id}"
    lines = []
    if run.name != name:
        lines.append(f"{head} was started under the name {run.name}, and goes on under {name}")
    starts = run.records("run_start")
    if starts and starts[-1].get("size") != size:
        lines.append(f"{head} had {starts[-1].get('size')} rank(s) before, and has {size} now")
    if starts and not equal_json(starts[-1].get("storage"), storage):
        before = starts[-1].get("storage") or "its own folder"
        lines.append(
            f"{head} kept its checkpoints in {before} before, and keeps them in {storage or 'its own folder'} now"
        )
    if cause := cause_of_death(run):
        lines.append(f"{head} ended without a word before: {cause}")
    # A run that is over may find nothing left to do, whatever is different now.
    how = "had completed" if run.state == "completed" else "was started"
    command = shlex.join(argv) or NO_SCRIPT
    changes = []
    if (before := shlex.join(run.argv) or NO_SCRIPT) != command:
        changes.append(f"{head} {how}, as: {before}; it goes on as: {command}")
    if (
        changed := changed_settings(run.last_settings("hparams"), to_recordable("hparams", wanted.hparams))
    ) is not None:
        changes.append(f"{head} {how}, with the hparams {changed[0]}; it goes on with {changed[1]}")
    if not changes and run.state == "completed":
        changes.append(f"{head} {how}, with the same command")
    return lines + changes


def _start_notice(run: _Opened, start: str | None) -> str:
    if run.restart == 0:
        return f"run {run.run_id} in {run.path}"
    begin = f"its newest checkpoint is {start}" if start else "it has no checkpoint to start from"
    return f"run {run.run_id} started again (restart {run.restart}) in {run.path}; {begin}"


def _end_notice(run_id: str, wanted: InitArguments, outcome: str, detail: str, size: int) -> str:
    ending = describe_outcome(outcome, detail)
    if outcome in ("completed", "invalid_hp"):
        return f"run {run_id} {ending}; to look at it: det-core runs show {run_id}"
    how = how_to_resume(run_id, wanted.command)
    aim = "to resume it"
    if size > 1 and wanted.environment.command is None:  # our own launchers alone say what was typed to start the job
        aim += f" by the launcher of its {size} ranks"
    if "CheckpointCorrupt: " in detail:  # the same command alone would fail again
        remove = f"det-core checkpoint rm ID --run {run_id}"
        return f"run {run_id} {ending}; {aim} from an older checkpoint, remove the damaged: {remove}; then {how}"
    return f"run {run_id} {ending}; {aim}: {how}"
