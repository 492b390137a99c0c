"""A run under a master: what this process is told of it, its folder, and how the master is asked."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core._info import ClusterInfo
from det_core.backend.rest import (
    Carrier,
    JournalCarrier,
    Master,
    MasterSession,
    ReportCarrier,
    RestBackend,
    Shipper,
    Task,
    about,
    credentials,
    write_task,
)
from det_core.core._bare import ending_of
from det_core.core._distributed import DistributedContext
from det_core.core._ground import Ground
from det_core.core._managed_storage import lent, master_storage, opened, storage_of_start
from det_core.core._ranks import on_chief
from det_core.core._searcher import Unit
from det_core.core._signals import EndSafely
from det_core.errors import DetCoreError
from det_core.journal import Cursor, Journal, RunFolder, cursors
from det_core.storage import Store, public_storage

logger = logging.getLogger("det_core.core")
TERM_PATIENCE = 3.0
"""Seconds that a SIGTERM may take to bring reports to the master."""


@dataclass(frozen=True)
class ManagedRun:
    """One run of a trial, as this rank records it.

    Attributes:
        run_id: the task of the trial, which stays the same in all its runs.
        restart: which run of the trial this is.
        path: the journal's folder as this rank sees it.
        trial_id: the trial.
    """

    run_id: str
    restart: int
    path: Path
    trial_id: int
    folder: RunFolder | None
    end_safely: EndSafely

    def last_line(self, outcome: str, detail: str) -> str:
        """What the trial's log says when it ends."""
        return f"trial {self.trial_id} {ending_of(outcome, detail)}"

    def release(self) -> None:
        """Let go of the folder, and of SIGTERM."""
        self.end_safely.restore()
        if self.folder is not None:
            self.folder.release()


@dataclass(frozen=True)
class _Known:
    """What the chief finds out, for all ranks."""

    master: Master
    storage_id: int | None
    start: dict[str, Any] | None
    """The configuration of the storage in which the checkpoint to start from lies, where that is another one."""
    path: str
    restart: int
    """How often this allocation's script was started before."""


def open_managed_run(
    distributed: DistributedContext,
    environment: Environment,
    info: ClusterInfo,
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None,
    given: Store | None,
    max_length: int | Mapping[str, int] | None = None,
) -> Ground:
    """Get ready to record one run of a trial, on all ranks together.

    Args:
        distributed: the ranks of the run.
        environment: credentials, timeouts, and where the journal goes.
        info: the task.
        checkpoint_storage: what the script says; None: as the experiment's configuration says.
        given: the store that it names.
        max_length: what the script says; it counts if the experiment's configuration says nothing.

    Raises:
        MasterError: the master does not answer, or refuses this task.
        ValueError: the configuration's ``checkpoint_storage`` cannot be used.
    """
    task = _task(info, max_length)
    with ExitStack() as undo:
        session = _session(environment, info)
        undo.callback(session.close)
        held: list[RunFolder] = []
        undo.callback(_release, held)
        known = on_chief(
            distributed, "init", lambda: _prepare(environment, info, session, checkpoint_storage, given, held, task)
        )
        config = info.trial.config
        configured = config.get("checkpoint_storage")
        store = given or opened(configured, environment, foreign=not known.master.ours)
        elsewhere = lent(info.latest_checkpoint, known.start, store, environment)
        path = _own_path(known.path, environment, bool(held))
        rank, trial_id = distributed.rank, info.trial.trial_id
        journal = Journal(path, run_id=info.allocation_id, restart=known.restart, rank=rank, trial_id=trial_id)
        shipper = _shipper(info, session, known, path, journal, rank)
        backend = RestBackend(
            session, known.master, task, shipper, storage_id=known.storage_id,
            ship_timeout=environment.ship_timeout, heir=environment.run_dir is not None and known.master.ours,
        )  # fmt: skip
        undo.callback(_let_go, backend)
        end_safely = EndSafely(lambda: shipper.drain(TERM_PATIENCE))
        undo.callback(end_safely.restore)
        folder = held[0] if held else None
        run = ManagedRun(info.task_id, info.trial.trial_run_id, path, trial_id, folder, end_safely)
        return Ground(
            run=run, journal=journal, backend=backend, store=store,
            storage=public_storage(configured if checkpoint_storage is None else checkpoint_storage, store),
            latest_checkpoint=info.latest_checkpoint, steps_completed=info.trial.steps_completed,
            metric=task.searcher.get("metric"),
            smaller_is_better=task.searcher.get("smaller_is_better", True) is not False,
            elsewhere=elsewhere, beside=_beside(info), units=_units(task),
            agent_id=info.agent_id, first_lines=(_first_line(info, None if environment.run_dir else path),),
            info=info, journal_restart=known.restart, asks_master=True, undo=undo.pop_all().close,
        )  # fmt: skip


def _session(environment: Environment, info: ClusterInfo) -> MasterSession:
    shown = credentials(environment.session_token or info.session_token, environment.user_token)
    return MasterSession(
        info.master_url,
        shown,
        cert_file=environment.master_cert or info.master_cert_file,
        cert_name=environment.master_cert_name or info.master_cert_name,
        patience=environment.master_timeout,
    )


def _prepare(
    environment: Environment,
    info: ClusterInfo,
    session: MasterSession,
    checkpoint_storage: Any,
    given: Store | None,
    held: list[RunFolder],
    task: Task,
) -> _Known:
    """On the chief: ask what the master is, tell it where checkpoints go, and take the folder."""
    trial = info.trial
    master = about(session)
    chosen = checkpoint_storage if given is not None else trial.config.get("checkpoint_storage")
    body = {"runId": trial.trial_id, "checkpointStorage": master_storage(chosen, given, foreign=not master.ours)}
    storage_id = session.call("POST", "/api/v1/runs/start", body).get("storageId")
    start = storage_of_start(session, info.latest_checkpoint, body["checkpointStorage"]) if master.ours else None
    path = environment.run_dir or environment.home / "runs" / f"managed-{trial.trial_id}-{trial.trial_run_id}"
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path, info.allocation_id, f"trial {trial.trial_id}")
    restart = folder.begin_restart()
    held.append(folder)
    write_task(path, info.master_url, master.cluster_id, task)
    return _Known(master, None if storage_id is None else int(storage_id), start, str(path), restart)


def _own_path(chiefs: str, environment: Environment, is_chief: bool) -> Path:
    """The chief's folder where it is visible here, else one of this machine's."""
    path = Path(chiefs)
    if not is_chief and not path.is_dir():
        path = environment.run_dir or environment.home / "runs" / path.name
        path.mkdir(parents=True, exist_ok=True)
    return path


def _shipper(
    info: ClusterInfo, session: MasterSession, known: _Known, path: Path, journal: Journal, rank: int
) -> Shipper:
    """Carries this rank's journal, after what earlier starts of the script in this allocation have left."""
    trial, to = info.trial, f"{info.master_url} {info.allocation_id}"
    earlier = [
        cursor
        for cursor in cursors(path, to=to, run_id=info.allocation_id)
        if cursor.rank == rank and cursor.restart < known.restart
    ]
    carrier: Carrier
    if known.master.ours:
        carrier = JournalCarrier(session, trial.trial_id, trial.trial_run_id)
    else:
        carrier = ReportCarrier(session, trial.trial_id, trial.trial_run_id, known.master)
    own = Cursor(path, known.restart, rank, to=to)
    return Shipper([*earlier, own], carrier, session, settle=journal.flush, folder=path)


def _task(info: ClusterInfo, max_length: int | Mapping[str, int] | None) -> Task:
    trial = info.trial
    return Task(
        trial_id=trial.trial_id,
        experiment_id=trial.experiment_id,
        trial_run_id=trial.trial_run_id,
        task_id=info.task_id,
        allocation_id=info.allocation_id,
        searcher=trial.config.get("searcher") or {},
        latest_checkpoint=info.latest_checkpoint,
        max_length=max_length,
    )


def _release(held: list[RunFolder]) -> None:
    for folder in held:
        folder.release()


def _let_go(backend: RestBackend) -> None:
    """Close it because of an error that is under way, and must not be hidden by one more."""
    try:
        backend.close()
    except DetCoreError as e:
        logger.warning("%s", e)


def _beside(info: ClusterInfo) -> str:
    """Where event files lie below the root of the store (wire contract, §8)."""
    trial = info.trial
    return f"{info.cluster_id}/tensorboard/experiment/{trial.experiment_id}/trial/{trial.trial_id}"


def _units(task: Task) -> Unit | None:
    """What lengths count: ``searcher.unit``, or the key of its ``max_length``, or of the script's."""
    length = task.searcher.get("max_length")
    if length is None:
        length = task.max_length
    name = next(iter(length)) if isinstance(length, Mapping) and len(length) == 1 else task.searcher.get("unit")
    return Unit.__members__.get(str(name).upper())


def _first_line(info: ClusterInfo, path: Path | None) -> str:
    """Which run this is; ``path`` if the person who reads it does not know where its journal lies."""
    trial = info.trial
    start = f"from checkpoint {info.latest_checkpoint}" if info.latest_checkpoint else "from scratch"
    run = f"trial {trial.trial_id} of experiment {trial.experiment_id}, run {trial.trial_run_id}, {start}"
    return run if path is None else f"{run}; master {info.master_url}; journal in {path}"
