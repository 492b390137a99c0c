"""``core.init()``: checks what was asked for, then puts the parts together."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from det_core._env import Environment
from det_core._info import ClusterInfo, get_cluster_info
from det_core.backend import LocalBackend
from det_core.core._bare import BareRun, first_line, open_bare_run, say
from det_core.core._checkpoint import CheckpointCache, CheckpointContext
from det_core.core._context import Context
from det_core.core._distributed import DistributedContext
from det_core.core._environments import launched_ranks
from det_core.core._facts import CheckpointFacts
from det_core.core._ground import Ground
from det_core.core._preemption import PreemptContext, PreemptMode
from det_core.core._profiler import ProfilerContext
from det_core.core._ranks import on_chief
from det_core.core._searcher import SearcherContext, Unit, configured_length
from det_core.core._tensorboard import Tensorboard, TensorboardMode, chosen_mode
from det_core.core._train import TrainContext
from det_core.errors import StorageError
from det_core.journal import Cursor, Journal
from det_core.storage import RetentionPolicy, Store, check_policy, open_store, public_storage

logger = logging.getLogger("det_core.core")
TIME_TO_END = 3.0
"""Seconds of the grace that are kept for what comes after checkpoints when a process ends; less of a short one."""


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode | None = None,
    max_length: int | Mapping[str, int] | None = None,
    name: str | None = None,
    resume: str | None = None,
    metric: str | None = None,
    searcher_metric: str | None = None,
    smaller_is_better: bool = True,
    retention: RetentionPolicy | None = None,
    validate: bool = False,
) -> Context:
    """Build the :class:`Context` of a training script. Use it as ``with core.init() as ctx:``.

    Args:
        distributed: the ranks that train together; needed as soon as there is more than one.
        checkpoint_storage: a folder, a URL such as ``s3://bucket/prefix``, or a dictionary like the
            ``checkpoint_storage`` field of an experiment's configuration. Left out: ``checkpoints`` in the
            run's own folder.
        preempt_mode: who may call ``ctx.preempt.should_preempt()``.
        tensorboard_mode: whether metrics are also written as TensorBoard events. Left out: yes, where the extra
            ``tensorboard`` is installed.
        max_length: the length of a bare run's one searcher operation: a number, or a number with its unit, as in
            ``{"epochs": 10}``. Left out: 1.
        name: what ``resume="latest"`` goes by. Left out: the script's absolute path.
        resume: ``"latest"`` or the id of a run to continue. Left out: ``DET_CORE_RESUME``, else a new run.
        metric: the validation metric of ``ctx.searcher.metric`` and ``ctx.train.get_experiment_best_validation()`` in
            a bare run. Left out, the latter goes by the metric that operations are completed with.
        searcher_metric: another name of ``metric``.
        smaller_is_better: which end of that metric is best.
        retention: which of this run's checkpoints stay, such as ``core.KeepLatest(3) | core.KeepBest(1, "loss")``.
            Applied whenever a new one is complete. Left out: all stay.
        validate: try out whether checkpoints can be written, before training starts. Left out: it shows at the first
            write, so that a script that only restores needs no permission to write.

    Raises:
        ValueError, TypeError: an argument cannot be used, or the environment says that there are more ranks.
        StorageError: the bucket for checkpoints does not exist or cannot be reached, or ``validate`` has found that
            checkpoints cannot be written; on every rank, in one line that says why, and what to do.
        RunNotFound, RunLocked: the run to resume is not there, or is being written.
        MasterError: this is a trial of an experiment, and its master does not answer, or refuses.

    In a trial of an experiment the master says what ``name``, ``resume``, ``metric`` and ``smaller_is_better``
    say elsewhere, and they are not looked at; nor is ``max_length``, if the experiment's configuration has one.
    ``checkpoint_storage``, left out, is that of the configuration.
    """
    environment = Environment.read()
    texts = {"name": name, "resume": resume, "metric": metric, "searcher_metric": searcher_metric}
    _check(distributed, preempt_mode, tensorboard_mode, texts, environment)
    if None not in (metric, searcher_metric) and metric != searcher_metric:
        raise ValueError(f"metric={metric!r} and searcher_metric={searcher_metric!r} are two names of one argument")
    metric = searcher_metric if metric is None else metric
    if retention is not None:
        check_policy(retention)
    length, units = configured_length(1 if max_length is None else max_length)
    info = get_cluster_info()
    if distributed is None:
        distributed = DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    given = (
        None
        if checkpoint_storage is None
        else open_store(checkpoint_storage, default=environment.home, scratch=environment.home / "scratch")
    )
    cached = environment.cache or environment.home / "cache"
    cache = CheckpointCache(cached / "checkpoints", environment.cache_bytes)
    choices = _Choices(
        preempt_mode, tensorboard_mode, length, units, metric, smaller_is_better, retention, environment.grace
    )
    with ExitStack() as undo:
        if given is not None:
            undo.callback(_close, given)
        if given is not None:
            # A bucket that does not exist has no checkpoint either: a run that is to be resumed would begin anew.
            on_chief(distributed, "init", given.validate if validate else given.reach)
        if info is not None and info.task_type == "TRIAL":
            from det_core.core._managed import open_managed_run

            ground = open_managed_run(distributed, environment, info, checkpoint_storage, given, max_length)
        else:
            run = open_bare_run(distributed, environment, name=name, resume=resume)
            undo.callback(run.release)
            ground = _bare(distributed, run, given, checkpoint_storage, choices, info)
        undo.callback(ground.undo)
        if given is None:
            on_chief(distributed, "init", ground.store.validate if validate else ground.store.reach)
        context = _compose(distributed, ground, cache, choices)
        undo.pop_all()
        return context


def _close(store: Store) -> None:
    """Give a store's connections back because of an error that is under way, and must not be hidden by one more."""
    try:
        store.close()
    except StorageError as e:
        logger.warning("%s", e)


class _Choices(NamedTuple):
    """What a script and its environment ask for."""

    preempt_mode: PreemptMode
    tensorboard_mode: TensorboardMode | None
    length: int
    units: Unit | None
    metric: str | None
    smaller_is_better: bool
    retention: RetentionPolicy | None
    grace: float | None


def _bare(
    distributed: DistributedContext,
    run: BareRun,
    given: Store | None,
    checkpoint_storage: Any,
    choices: _Choices,
    info: ClusterInfo | None,
) -> Ground:
    """What a run without a master stands on; ``given`` is a store that is not the run's own folder."""
    store = given or open_store(None, default=run.path / "checkpoints")
    latest, steps_completed = on_chief(distributed, "init", lambda: _newest(store, run))
    return Ground(
        run=run,
        journal=Journal(run.path, run_id=run.run_id, restart=run.restart, rank=distributed.rank),
        backend=LocalBackend(
            run.path,
            length=choices.length,
            latest_checkpoint=latest,
            searcher_metric=choices.metric,
            smaller_is_better=choices.smaller_is_better,
        ),
        store=store,
        storage=None if given is None else public_storage(checkpoint_storage, given),
        latest_checkpoint=latest,
        steps_completed=steps_completed,
        metric=choices.metric,
        smaller_is_better=choices.smaller_is_better,
        beside=None if given is None else f"tensorboard/{run.run_id}",
        units=choices.units,
        agent_id=os.uname().nodename,
        first_lines=(*run.remarks, first_line(run, latest)),
        info=info,
    )


def _newest(store: Store, run: BareRun) -> tuple[str | None, int]:
    """The checkpoint that a resumed run starts from, with its step."""
    found = store.list(run.run_id) if run.resumed else []
    return (found[-1].storage_id, found[-1].steps_completed) if found else (None, 0)


def _compose(distributed: DistributedContext, ground: Ground, cache: CheckpointCache, choices: _Choices) -> Context:
    """Put the parts together."""
    run, journal, store, backend = ground.run, ground.journal, ground.store, ground.backend
    restart = run.restart if ground.journal_restart is None else ground.journal_restart
    tensorboard = Tensorboard(
        chosen_mode(choices.tensorboard_mode),
        journal=lambda: Cursor(run.path, restart, distributed.rank, name="drawn"),
        settle=journal.flush,
        local=run.path / "tensorboard" / f"rank-{distributed.rank}",
        kept=None
        if ground.beside is None
        else lambda source, name: store.put_beside(source, f"{ground.beside}/{name}"),
        where=f"{store.root}/{ground.beside}",
        rank=distributed.rank,
        steps_completed=ground.steps_completed,
    )
    facts = CheckpointFacts(ground, tensorboard, choices.retention)
    preempt = PreemptContext(
        distributed, choices.preempt_mode, acknowledge=backend.acknowledge_preemption, record=journal.record,
        master=backend if ground.asks_master else None, signals=not ground.asks_master,
    )  # fmt: skip
    if distributed.rank == 0:
        for line in ground.first_lines:
            say(line)
    host, pid = os.uname().nodename, os.getpid()
    start = {"size": distributed.size, "host": host, "pid": pid, "storage": ground.storage}
    if not ground.asks_master:
        start["notes_should_preempt"] = True  # its absence says something, but not in a record of an older version
    journal.record("run_start", start)
    context = Context(
        distributed=distributed,
        checkpoint=CheckpointContext(
            distributed, store, run_id=run.run_id, restart=run.restart, committing=facts.committing,
            reports=journal, registered=facts.registered, deleted=facts.deleted, restored=facts.restored,
            described=backend.checkpoint_metadata, elsewhere=ground.elsewhere, cache=cache,
            latest=ground.latest_checkpoint,
            deadline=lambda: _deadline(preempt, choices.grace), say=say if distributed.rank == 0 else logger.debug,
        ),
        preempt=preempt,
        train=TrainContext(distributed, journal, backend, tensorboard),
        searcher=SearcherContext(
            distributed, backend, record=journal.record, units=ground.units, metric=ground.metric,
            smaller_is_better=ground.smaller_is_better,
        ),
        profiler=ProfilerContext(distributed, journal.metrics, agent_id=ground.agent_id),
        ground=ground,
    )  # fmt: skip
    preempt.start()
    return context


def _deadline(preempt: PreemptContext, grace: float | None) -> float | None:
    """Until when a preempted process may save, on the monotonic clock; None: it is not, or nobody set a limit."""
    if grace is None or preempt.requested_at is None:
        return None
    return preempt.requested_at + grace - min(TIME_TO_END, grace / 5)


def _check(
    distributed: Any,
    preempt_mode: Any,
    tensorboard_mode: Any,
    texts: Mapping[str, Any],
    environment: Environment,
) -> None:
    """Refuse what cannot work, before anything is made."""
    if distributed is not None and not isinstance(distributed, DistributedContext):
        raise TypeError(f"distributed must be a core.DistributedContext, not {type(distributed).__name__}")
    if not isinstance(preempt_mode, PreemptMode):
        raise TypeError(f"preempt_mode must be a core.PreemptMode, not {preempt_mode!r}")
    if tensorboard_mode is not None and not isinstance(tensorboard_mode, TensorboardMode):
        raise TypeError(f"tensorboard_mode must be a core.TensorboardMode, not {tensorboard_mode!r}")
    for argument, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{argument}={value!r}: expected a text that is not empty, or None")
    if distributed is None and (ranks := launched_ranks(environment)) is not None:
        raise ValueError(
            f"{ranks.launcher} started {ranks.numbers['size']} processes, so core.init() needs to know the ranks: "
            f"core.init(distributed={ranks.line}), or core.DistributedContext.detect() for any launcher"
        )
