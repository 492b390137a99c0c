"""A run under a master: what this process is told of it, its folder, and how the master hears of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from det_core._env import Environment
from det_core._info import ClusterInfo
from det_core._length import split_length
from det_core.backend.rest import (
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
from det_core.storage import event_files_of_experiment, storage_without_secrets

logger = logging.getLogger("det_core.core")

SIGTERM_SHIP_TIMEOUT = 3.0
"""Seconds that a SIGTERM may take to bring reports to the master."""


class _ChiefInfo(NamedTuple):
    """What the chief finds out, for all ranks."""

    master: Master
    storage_id: int | None
    start: dict[str, Any] | None
    """The configuration of the storage in which the checkpoint to start from lies, where that is another one."""
    path: str
    restart: int
    """How often this allocation's script was started before."""


def open_managed_run(distributed: DistributedContext, info: ClusterInfo, wanted: InitArguments, undo: ExitStack) -> Run:
    """Get ready to record one run of a trial, on all ranks together.

    Args:
        distributed: the ranks of the run.
        info: the task.
        wanted: what the script asks for; of its lengths and storages those count that the experiment leaves open.
        undo: closes what was opened, if the context cannot be made after all.

    Raises:
        MasterError: the master does not answer, or refuses this task.
        ValueError: the configuration's ``checkpoint_storage`` cannot be used.
        StorageError: checkpoints cannot be kept where they are to go.
    """
    environment, trial = wanted.environment, info.trial
    configured = trial.config.get("checkpoint_storage")
    task = _task(info, wanted.max_length)
    session = _session(environment, info)
    undo.callback(session.close)
    hold = ExitStack()
    undo.callback(hold.close)
    known = on_chief(distributed, "init", lambda: _prepare(info, session, wanted, task, hold))
    if distributed.rank == 0:
        _warn_of_opposite_goal(wanted, task.searcher)
    store = wanted.store or open_configured_store(configured, environment, foreign=not known.master.ours)
    undo.callback(close_quietly, store)
    other_stores = open_start_store(info.latest_checkpoint, known.start, store, environment)
    path = Path(known.path)
    if not path.is_dir():  # on another machine, without the chief's file system
        path = environment.run_dir or environment.home / "runs" / path.name
        path.mkdir(parents=True, exist_ok=True)
    rank = distributed.rank
    journal = Journal(path, run_id=info.allocation_id, restart=known.restart, rank=rank, trial_id=trial.trial_id)
    shipper = _shipper(info, session, known, path, journal, rank)
    backend = RestBackend(
        session, known.master, task, shipper, storage_id=known.storage_id,
        ship_timeout=environment.ship_timeout, heir=environment.run_dir is not None and known.master.ours,
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


def _warn_of_opposite_goal(wanted: InitArguments, searcher: Mapping[str, Any]) -> None:
    """Say that the search keeps the smallest where the script wants the largest: it would keep the worst trials.

    The other way round the script may just have left ``smaller_is_better`` out.
    """
    metric, smaller = searcher.get("metric"), searcher.get("smaller_is_better", True) is not False
    if smaller and not wanted.smaller_is_better and wanted.searcher_metric in (None, metric):
        logger.warning(
            "the script says core.init(smaller_is_better=False), but the search goes by the configuration: "
            "the smallest %s is the best there. If that is wrong, set searcher.smaller_is_better: false in it",
            metric or "metric",
        )


def _prepare(
    info: ClusterInfo, session: MasterSession, wanted: InitArguments, task: Task, hold: ExitStack
) -> _ChiefInfo:
    """The chief's part: tell the master, take the run's folder for writing, see that checkpoints can be kept.

    Args:
        hold: lets go of the folder.
    """
    if wanted.store is not None:
        wanted.check_store(wanted.store)
    master = about(session)
    storage_id, start = _register(info, session, master, wanted)
    folder = _open_folder(wanted.environment, info, wanted.command)
    hold.callback(folder.release)
    write_task(folder.path, info.master_url, master.cluster_id, task)
    if wanted.store is None:
        configured = info.trial.config.get("checkpoint_storage")
        wanted.check_store(open_configured_store(configured, wanted.environment, foreign=not master.ours))
    return _ChiefInfo(master, storage_id, start, str(folder.path), folder.restart)


def _session(environment: Environment, info: ClusterInfo) -> MasterSession:
    return MasterSession(
        info.master_url,
        credentials(environment.session_token or info.session_token, environment.user_token),
        cert_file=environment.master_cert or info.master_cert_file,
        cert_name=environment.master_cert_name or info.master_cert_name,
        patience=environment.master_timeout,
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
        latest_checkpoint=info.latest_checkpoint,
        max_length=max_length,
    )


def _register(
    info: ClusterInfo, session: MasterSession, master: Master, wanted: InitArguments
) -> tuple[int | None, dict[str, Any] | None]:
    """Tell the master that this run starts and where its checkpoints go.

    Returns:
        The master's number of that storage, and the configuration of the one in which the checkpoint to start from
        lies, where that is another.
    """
    section = info.trial.config.get("checkpoint_storage")
    chosen = section if wanted.store is None else wanted.checkpoint_storage
    storage = master_storage(chosen, wanted.store, foreign=not master.ours)
    body = {"runId": info.trial.trial_id, "checkpointStorage": storage}
    storage_id = session.call("POST", "/api/v1/runs/start", body).get("storageId")
    start = start_checkpoint_storage(session, info.latest_checkpoint, storage) if master.ours else None
    return None if storage_id is None else int(storage_id), start


def _open_folder(environment: Environment, info: ClusterInfo, command: str | None) -> RunFolder:
    """The folder of this run's journals, taken for writing."""
    trial = info.trial
    path = environment.run_dir or environment.home / "runs" / f"managed-{trial.trial_id}-{trial.trial_run_id}"
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path, info.allocation_id, f"trial {trial.trial_id}")
    folder.begin_restart(describe_start(command))
    return folder


def _shipper(
    info: ClusterInfo, session: MasterSession, known: _ChiefInfo, path: Path, journal: Journal, rank: int
) -> Shipper:
    """Carries this rank's journal, after what earlier starts of the script in this allocation have left."""
    trial, to = info.trial, f"{info.master_url} {info.allocation_id}"
    carrier = (
        JournalCarrier(session, trial.trial_id, trial.trial_run_id)
        if known.master.ours
        else ReportCarrier(session, trial.trial_id, trial.trial_run_id, known.master)
    )
    journals = rank_cursors(path, known.restart, rank, to=to, run_id=info.allocation_id)
    return Shipper(journals, carrier, session, settle=journal.flush, folder=path)


def _units(task: Task) -> Unit | None:
    """What lengths count: ``searcher.unit``, or the key of its ``max_length``, or of the script's."""
    length = task.searcher.get("max_length")
    if length is None:
        length = task.max_length
    _, unit = split_length(length)
    return Unit.__members__.get(str(unit or task.searcher.get("unit")).upper())


def _start_notice(info: ClusterInfo, start: str | None, path: Path | None) -> str:
    """Return which run this is; ``path`` if the person who reads it does not know where its journal lies."""
    trial = info.trial
    begin = f"with checkpoint {start} to start from" if start else "from scratch"
    run = f"trial {trial.trial_id} of experiment {trial.experiment_id}, run {trial.trial_run_id}, {begin}"
    return run if path is None else f"{run}; master {info.master_url}; journal in {path}"
