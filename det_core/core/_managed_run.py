"""Runs under a master: registration, run directory, shipping."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from det_core._env import Environment
from det_core._info import ClusterInfo
from det_core._length import split_length
from det_core.backend._master import MasterInfo, get_master_info
from det_core.backend._rest import RestBackend, Task
from det_core.backend._shipper import BatchSender, ReportSender, Shipper
from det_core.backend._sync import write_task
from det_core.core._distributed import DistributedContext
from det_core.core._managed_storage import (
    master_storage,
    open_configured_store,
    open_start_store,
    start_checkpoint_storage,
)
from det_core.core._rank_group import on_chief
from det_core.core._run import InitArguments, Run, close_quietly, describe_outcome, describe_start
from det_core.core._searcher import Unit
from det_core.core._signals import FlushOnSigterm
from det_core.journal import Journal, RunFolder, rank_cursors
from det_core.protocol import MasterSession
from det_core.storage import event_files_of_experiment, storage_without_secrets

logger = logging.getLogger("det_core.core")

SIGTERM_SHIP_TIMEOUT = 3.0
"""Maximum time for a SIGTERM to ship reports to the master, in seconds."""


class _ChiefInfo(NamedTuple):
    """The chief's knowledge of the run, for all ranks."""

    master: MasterInfo
    storage_id: int | None
    start: dict[str, Any] | None
    """Settings of the storage of the checkpoint to start from, or None if it is this run's own."""
    path: str
    restart: int
    """Number of earlier starts of the script in this allocation."""


def open_managed_run(distributed: DistributedContext, info: ClusterInfo, wanted: InitArguments, undo: ExitStack) -> Run:
    """Register one run of a trial, and open its journal and store, on all ranks.

    Args:
        distributed: the ranks of the run.
        info: the task.
        wanted: arguments of the script; its length and storage count if the experiment leaves them open.
        undo: closes opened components if a later step fails.

    Raises:
        MasterError: If the master does not answer, or rejects this task.
        ValueError: If the configuration's ``checkpoint_storage`` is invalid.
        StorageError: If the checkpoint store cannot be used.
    """
    environment = wanted.environment
    trial = info.trial
    configured = trial.config.get("checkpoint_storage")
    task = _task(info, wanted.max_length)
    session = _session(environment, info)
    undo.callback(session.close)
    hold = ExitStack()
    undo.callback(hold.close)
    known = on_chief(distributed, "init", lambda: _prepare(info, session, wanted, task, hold))
    if distributed.rank == 0:
        _warn_of_opposite_goal(wanted, task.searcher)
    store = wanted.store or open_configured_store(configured, environment, is_determined=not known.master.is_det_core)
    undo.callback(close_quietly, store)
    other_stores = open_start_store(info.latest_checkpoint, known.start, store, environment)
    path = _local_path(environment, Path(known.path))
    rank = distributed.rank
    journal = Journal(path, run_id=info.allocation_id, restart=known.restart, rank=rank, trial_id=trial.trial_id)
    shipper = _shipper(info, session, known, path, journal, rank)
    backend = RestBackend(
        session, known.master, task, shipper, storage_id=known.storage_id, ship_timeout=environment.ship_timeout,
        has_successor=environment.run_dir is not None and known.master.is_det_core,
    )  # fmt: skip
    undo.callback(close_quietly, backend)
    hold.callback(FlushOnSigterm(lambda: shipper.drain(SIGTERM_SHIP_TIMEOUT)).restore)
    return Run(
        run_id=info.task_id,
        restart=trial.trial_run_id,
        path=path,
        journal=journal,
        journal_restart=known.restart,
        backend=backend,
        store=store,
        storage=storage_without_secrets(configured if wanted.store is None else wanted.checkpoint_storage, store),
        latest_checkpoint=info.latest_checkpoint,
        steps_completed=trial.steps_completed,
        metric=task.searcher.get("metric"),
        smaller_is_better=task.searcher.get("smaller_is_better", True) is not False,
        units=_units(task),
        hparams=trial.hparams,
        agent_id=info.agent_id,
        remarks=(),
        start_notice=lambda start: _start_notice(info, start, None if environment.run_dir else path),
        end_notice=lambda outcome, detail: f"trial {trial.trial_id} {describe_outcome(outcome, detail)}",
        release=hold.close,
        tensorboard_prefix=f"{event_files_of_experiment(info.cluster_id, trial.experiment_id)}/trial/{trial.trial_id}",
        other_stores=other_stores,
        info=info,
        managed=True,
    )


def _local_path(environment: Environment, path: Path) -> Path:
    """Return the run directory on this rank: the chief's, or one on a node without the chief's file system."""
    if not path.is_dir():
        path = environment.run_dir or environment.home / "runs" / path.name
        path.mkdir(parents=True, exist_ok=True)
    return path


def _warn_of_opposite_goal(wanted: InitArguments, searcher: Mapping[str, Any]) -> None:
    """Warn if the search minimizes what the script maximizes: it would keep the worst trials."""
    metric = searcher.get("metric")
    smaller = searcher.get("smaller_is_better", True) is not False
    # Not the other way round: there the script may just have left smaller_is_better out.
    if smaller and not wanted.smaller_is_better and wanted.searcher_metric in (None, metric):
        logger.warning(
            "core.init(smaller_is_better=False) contradicts the experiment, which minimizes %s and decides; to "
            "maximize it, set searcher.smaller_is_better: false in its configuration",
            metric or "metric",
        )


def _prepare(
    info: ClusterInfo, session: MasterSession, wanted: InitArguments, task: Task, hold: ExitStack
) -> _ChiefInfo:
    """Register the run with the master, lock its directory and check the store, on the chief.

    Args:
        hold: releases the directory.
    """
    if wanted.store is not None:
        wanted.check_store(wanted.store)
    master = get_master_info(session)
    storage_id, start = _register(info, session, master, wanted)
    folder = _open_folder(wanted.environment, info, wanted.command)
    hold.callback(folder.release)
    write_task(folder.path, info.master_url, master.cluster_id, task)
    if wanted.store is None:
        configured = info.trial.config.get("checkpoint_storage")
        wanted.check_store(open_configured_store(configured, wanted.environment, is_determined=not master.is_det_core))
    return _ChiefInfo(master, storage_id, start, str(folder.path), folder.restart)


def _session(environment: Environment, info: ClusterInfo) -> MasterSession:
    return MasterSession(
        info.master_url,
        session_token=environment.session_token or info.session_token,
        user_token=environment.user_token,
        cert_file=environment.master_cert or info.master_cert_file,
        cert_name=environment.master_cert_name or info.master_cert_name,
        timeout=environment.master_timeout,
    )


def _task(info: ClusterInfo, max_length: int | Mapping[str, int] | None) -> Task:
    trial = info.trial
    return Task(
        trial_id=trial.trial_id,
        experiment_id=trial.experiment_id,
        trial_run_id=trial.trial_run_id,
        task_id=info.task_id,
        allocation_id=info.allocation_id,
        searcher=trial.config.get("searcher") or {},
        max_length=max_length,
    )


def _register(
    info: ClusterInfo, session: MasterSession, master: MasterInfo, wanted: InitArguments
) -> tuple[int | None, dict[str, Any] | None]:
    """Register the start of this run and its storage with the master.

    Returns:
        The master's number of that storage, and the settings of the storage of the checkpoint to start from, or None if
        it is the same.
    """
    chosen = wanted.checkpoint_storage
    if wanted.store is None:
        chosen = info.trial.config.get("checkpoint_storage")
    storage = master_storage(chosen, wanted.store, is_determined=not master.is_det_core)
    body = {"runId": info.trial.trial_id, "checkpointStorage": storage}
    storage_id = session.call("POST", "/api/v1/runs/start", body).get("storageId")
    start = start_checkpoint_storage(session, info.latest_checkpoint, storage) if master.is_det_core else None
    return None if storage_id is None else int(storage_id), start


def _open_folder(environment: Environment, info: ClusterInfo, command: str | None) -> RunFolder:
    """Return the directory of this run's journals, locked for writing."""
    trial = info.trial
    path = environment.run_dir or environment.home / "runs" / f"managed-{trial.trial_id}-{trial.trial_run_id}"
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path, info.allocation_id, f"trial {trial.trial_id}")
    folder.begin_restart(describe_start(command))
    return folder


def _shipper(
    info: ClusterInfo, session: MasterSession, known: _ChiefInfo, path: Path, journal: Journal, rank: int
) -> Shipper:
    """Return the shipper of this rank's journal, after those of earlier starts of the script in this allocation."""
    trial = info.trial
    to = f"{info.master_url} {info.allocation_id}"
    sender: BatchSender | ReportSender = ReportSender(session, trial.trial_id, trial.trial_run_id, known.master)
    if known.master.is_det_core:
        sender = BatchSender(session, trial.trial_id, trial.trial_run_id)
    journals = rank_cursors(path, known.restart, rank, to=to, run_id=info.allocation_id)
    return Shipper(journals, sender, session, flush=journal.flush, folder=path)


def _units(task: Task) -> Unit | None:
    """Return the unit of lengths: the key of ``max_length``, or ``searcher.unit``."""
    length = task.searcher.get("max_length")
    if length is None:
        length = task.max_length
    _, unit = split_length(length)
    return Unit.__members__.get(str(unit or task.searcher.get("unit")).upper())


def _start_notice(info: ClusterInfo, start: str | None, path: Path | None) -> str:
    """Return the line that names this run; with its journal, if ``path`` is given."""
    trial = info.trial
    checkpoint = "from scratch"
    if start:
        checkpoint = f"with checkpoint {start} to start from"
    notice = f"trial {trial.trial_id} of experiment {trial.experiment_id}, run {trial.trial_run_id}, {checkpoint}"
    if path is None:
        return notice
    return f"{notice}; master {info.master_url}; journal in {path}"
