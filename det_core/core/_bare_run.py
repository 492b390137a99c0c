"""A run without a master: its folder opened by the chief and known to every rank, its first and last line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from det_core._info import ClusterInfo
from det_core.backend import LocalBackend
from det_core.core._distributed import DistributedContext
from det_core.core._ranks import on_chief
from det_core.core._run import Run, Wanted, ending_of, script, started_as
from det_core.journal import Journal, RunFolder, RunRecord, read_run
from det_core.storage import Store, event_files_of_run, open_store, public_storage

NEVER_ASKED = "it had not called should_preempt() yet, and before that a signal ends a process at once"


class _Opened(NamedTuple):
    """What the chief has opened, for all ranks."""

    run_id: str
    restart: int
    path: str
    latest_checkpoint: str | None
    steps_completed: int
    first_lines: tuple[str, ...]


def open_bare_run(distributed: DistributedContext, info: ClusterInfo | None, wanted: Wanted, undo: ExitStack) -> Run:
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

    def open_on_chief() -> _Opened:
        if wanted.store is not None:  # before anything is made: its address may be misspelt
            wanted.check_store(wanted.store)
        folder, remarks = _open_folder(wanted, distributed.size)
        chiefs.append(folder)
        undo.callback(folder.release)
        store = wanted.store or _own_store(folder.path)
        if wanted.store is None:
            wanted.check_store(store)
        kept = store.list(folder.run_id) if folder.restart else []
        latest, steps = (kept[-1].storage_id, kept[-1].steps_completed) if kept else (None, 0)
        lines = (*remarks, _first_line(folder, latest))
        return _Opened(folder.run_id, folder.restart, str(folder.path), latest, steps, lines)

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
            path, length=length, latest_checkpoint=opened.latest_checkpoint, searcher_metric=wanted.metric,
            smaller_is_better=wanted.smaller_is_better,
        ),
        store=store,
        storage=None if wanted.store is None else public_storage(wanted.checkpoint_storage, store),
        latest_checkpoint=opened.latest_checkpoint,
        steps_completed=opened.steps_completed,
        metric=wanted.metric,
        smaller_is_better=wanted.smaller_is_better,
        units=units,
        hparams=wanted.hparams,
        agent_id=os.uname().nodename,
        first_lines=opened.first_lines,
        last_line=lambda outcome, detail: _last_line(opened.run_id, wanted.command, outcome, detail),
        release=chiefs[0].release if chiefs else lambda: None,
        beside=None if wanted.store is None else event_files_of_run(opened.run_id),
        info=info,
    )  # fmt: skip


def never_asked(run: RunRecord) -> bool:
    """Whether the last start of a run ended without a word, and before any rank had called should_preempt()."""
    last = run.restarts - 1
    starts = [r for r in run.records("run_start") if r.restart == last and r.get("notes_should_preempt")]
    ended = {r.rank for r in run.records("run_end") if r.restart == last}
    asked = any(r.restart == last for r in run.records("should_preempt"))
    return not asked and any(r.rank not in ended for r in starts)


def _own_store(path: Path) -> Store:
    return open_store(None, default=path / "checkpoints")


def _open_folder(wanted: Wanted, size: int) -> tuple[RunFolder, list[str]]:
    """The folder of the run, taken for writing, and what a person may not expect of it."""
    home, name = wanted.environment.home, wanted.name or script()
    resume = wanted.resume or wanted.environment.resume
    start = started_as(wanted.command)
    found = RunFolder.latest(home, name) if resume == "latest" else RunFolder.open(home, resume) if resume else None
    if found is None:
        folder = RunFolder.create(home, name=name)
        remarks = [f"there is no earlier run named {name} in {home}: starting a new one"] if resume else []
    else:
        folder, remarks = found, _differences(read_run(found.path), name, size, start["argv"])
    folder.begin_restart(start)
    return folder, remarks


def _differences(run: RunRecord, name: str, size: int, argv: Sequence[str]) -> list[str]:
    """How this start of a run differs from the ones before."""
    found = []
    if run.name != name:
        found.append(f"run {run.run_id} was started under the name {run.name}, and goes on under {name}")
    sizes = [r["size"] for r in run.records("run_start")]
    if sizes and sizes[-1] != size:
        found.append(f"run {run.run_id} had {sizes[-1]} rank(s) before, and has {size} now")
    if never_asked(run):
        found.append(f"run {run.run_id} ended without a word before: {NEVER_ASKED}")
    before, now = shlex.join(run.argv), shlex.join(argv)
    how = "had completed" if run.state == "completed" else "was started"  # one that is over may find nothing left to do
    if before != now:
        found.append(f"run {run.run_id} {how}, as: {before}; it goes on as: {now}")
    elif run.state == "completed":
        found.append(f"run {run.run_id} {how}, with the same command")
    return found


def _first_line(folder: RunFolder, latest_checkpoint: str | None) -> str:
    if folder.restart == 0:
        return f"run {folder.run_id} in {folder.path}"
    start = f"from checkpoint {latest_checkpoint}" if latest_checkpoint else "without a checkpoint to start from"
    return f"run {folder.run_id} resumed (restart {folder.restart}) {start}, in {folder.path}"


def _last_line(run_id: str, command: str, outcome: str, detail: str) -> str:
    ending = ending_of(outcome, detail)
    if outcome in ("completed", "invalid_hp"):
        return f"run {run_id} {ending}; to look at it: det-core runs show {run_id}"
    how = f"DET_CORE_RESUME={run_id} {command}"
    if "CheckpointCorrupt: " in detail:  # the same command alone would fail again
        remove = f"det-core checkpoint rm ID --run {run_id}"
        return f"run {run_id} {ending}; to resume it from an older checkpoint, remove the damaged: {remove}; then {how}"
    return f"run {run_id} {ending}; to resume it: {how}"
