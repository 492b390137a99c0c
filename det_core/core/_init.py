"""``core.init()``: validate the arguments, then compose the context."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from det_core._env import Environment
from det_core._environments import detect_ranks
from det_core._info import get_cluster_info
from det_core._notices import open_standard_streams, print_notice
from det_core.core._bare_run import open_bare_run
from det_core.core._checkpoint import CheckpointContext, RunObserver, ScriptChecks, StartCheckpoint
from det_core.core._context import Context
from det_core.core._deadline import GRACE, StopDeadline
from det_core.core._distributed import DistributedContext, check_process_group
from det_core.core._end import end_in_time
from det_core.core._main_guard import exit_if_importing_script
from det_core.core._preemption import PreemptContext, PreemptMode
from det_core.core._profiler import ProfilerContext
from det_core.core._run import InitArguments, Run, close_quietly, hide_internal_frames, is_printable, to_recordable
from det_core.core._searcher import SearcherContext, configured_length
from det_core.core._tensorboard import TensorboardFiles, TensorboardMode, resolve_mode
from det_core.core._train import TrainContext
from det_core.journal import rank_cursors
from det_core.storage import RetentionPolicy, check_policy, open_store

logger = logging.getLogger("det_core.core")


@hide_internal_frames
def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode | None = None,
    max_length: int | Mapping[str, int] | None = None,
    name: str | None = None,
    resume: str | None = None,
    searcher_metric: str | None = None,
    smaller_is_better: bool = True,
    retention: RetentionPolicy | None = None,
    hparams: Mapping[str, Any] | None = None,
    check_storage: bool = False,
) -> Context:
    """Create the :class:`Context` of a training script. Use it as ``with core.init() as ctx:``.

    Args:
        distributed: the ranks that train together; required with more than one.
        checkpoint_storage: a directory, a URL such as ``s3://bucket/prefix``, or a dictionary like the
            ``checkpoint_storage`` field of an experiment's configuration. Defaults to ``checkpoints`` in the run's
            directory.
        preempt_mode: ranks that may call ``ctx.preempt.should_preempt()``.
        tensorboard_mode: whether metrics are also written as TensorBoard observer. Defaults to yes if the extra
            ``tensorboard`` is installed.
        max_length: length of a bare run's one searcher operation: a number, or a number with its unit, as in
            ``{"epochs": 10}``. Defaults to 1.
        name: name of the run for ``resume="latest"``, one line of text. Defaults to the script's absolute path; in a
            notebook, stdin or ``python -c`` to the working directory, which ``latest`` does not accept.
        resume: ``"latest"`` or the ID of a run to continue. Defaults to ``DET_CORE_RESUME``, else to a new run. An ID
            in ``DET_CORE_RESUME`` overrides ``"latest"`` here.
        searcher_metric: validation metric of ``ctx.searcher.metric`` and
            ``ctx.train.get_experiment_best_validation()`` in a bare run. The latter defaults to the metric with which
            operations are completed.
        smaller_is_better: whether a smaller value of that metric is better.
        retention: policy that selects the checkpoints of this run to keep, such as
            ``core.KeepLatest(3) | core.KeepBest(1, "loss")``. Applied after each checkpoint. Defaults to keeping all.
        hparams: hyperparameters of a bare run: ``ctx.hparams``, also recorded for ``det-core runs show``, with the
            ``str()`` of values that JSON cannot hold. A resume with other hyperparameters prints a notice; the record
            has those of each start.
        check_storage: check that checkpoints can be written before training starts. Otherwise the first write does, so
            that a script that only restores needs no permission to write.

    Raises:
        ValueError, TypeError: If an argument is invalid, or the environment shows several ranks that are not passed.
        StorageError: If the bucket for checkpoints does not exist or is unreachable, or ``check_storage`` found that
            checkpoints cannot be written. Raised on every rank.
        RunNotFound, RunLocked: If the run to resume does not exist, or another process writes it.
        MasterError: If this is a trial of an experiment, and its master does not answer, or rejects it.
        SystemExit: If this process is a child of spawn or forkserver that is importing the script: protect the lines
            that train with ``if __name__ == "__main__":``.

    In a trial of an experiment, the experiment's settings replace ``name``, ``resume``, ``searcher_metric``,
    ``smaller_is_better`` and ``hparams``; a contradicting ``smaller_is_better=False`` is warned of. ``max_length`` is
    ignored if the experiment's configuration has one, and ``checkpoint_storage`` defaults to the configuration's.
    """
    exit_if_importing_script("core.init()")
    open_standard_streams()
    end_in_time()
    environment = Environment.read()
    texts = {"name": name, "resume": resume, "searcher_metric": searcher_metric}
    _validate(distributed, preempt_mode, tensorboard_mode, hparams, texts, environment)
    if retention is not None:
        check_policy(retention)
    length = configured_length(1 if max_length is None else max_length)
    info = get_cluster_info()
    if distributed is None:
        distributed = DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    with ExitStack() as undo:
        store = None
        if environment.probe is not None:
            checkpoint_storage = (
                None  # check-resume trains copies of a run, which may write nothing outside of its home
            )
        if checkpoint_storage is not None:
            store = open_store(checkpoint_storage, default=environment.home, scratch=environment.home / "scratch")
            undo.callback(close_quietly, store)
        wanted = InitArguments(
            environment=environment, store=store, checkpoint_storage=checkpoint_storage, max_length=max_length,
            length=length, name=name, resume=resume, searcher_metric=searcher_metric,
            smaller_is_better=smaller_is_better, hparams=dict(hparams or {}), check_storage=check_storage,
        )  # fmt: skip
        if info is not None and info.task_type == "TRIAL":
            from det_core.core._managed_run import open_managed_run

            run = open_managed_run(distributed, info, wanted, undo)
        else:
            run = open_bare_run(distributed, info, wanted, undo)
        context = _compose(distributed, run, environment, preempt_mode, tensorboard_mode, retention)
        if environment.probe is not None:
            importlib.import_module(environment.probe).attach(context)
        undo.pop_all()
        return context


def _compose(
    distributed: DistributedContext,
    run: Run,
    environment: Environment,
    preempt_mode: PreemptMode,
    tensorboard_mode: TensorboardMode | None,
    retention: RetentionPolicy | None,
) -> Context:
    """Compose the context of its parts."""
    is_chief = distributed.rank == 0
    start = StartCheckpoint(
        run.latest_checkpoint,
        run.steps_completed,
        unlisted=run.unlisted_checkpoints,
        suspects=run.suspect_checkpoints,
        info=run.info,
    )
    tensorboard = _tensorboard_files(run, distributed.rank, start, tensorboard_mode)
    preempt = PreemptContext(
        distributed, preempt_mode, acknowledge=run.backend.acknowledge_preemption, record=run.journal.record,
        master=run.backend if run.managed else None, signals=not run.managed,
        grace=None if run.managed else environment.grace or GRACE,
        launched=environment.command is not None,
    )  # fmt: skip
    deadline = StopDeadline(lambda: preempt.requested_at, environment.grace, is_limited=not run.managed)
    for store in (run.store, *run.other_stores.values()):
        store.limit(deadline)
    say = print_notice if is_chief else logger.debug
    checks = ScriptChecks(distributed, run, start, say)
    observer = RunObserver(run, tensorboard, retention, checks)
    checkpoint = CheckpointContext(
        distributed, run.store, run_id=run.run_id, restart=run.restart, observer=observer,
        start=start, other_stores=run.other_stores, scratch=environment.home / "scratch",
        deadline=deadline, say=say,
    )  # fmt: skip
    checkpoint.choose_start()
    if is_chief:
        for line in (*run.remarks, run.start_notice(start.peek())):
            print_notice(line)
    _record_start(distributed, run)
    context = Context(
        distributed=distributed,
        checkpoint=checkpoint,
        start=start,
        preempt=preempt,
        train=TrainContext(distributed, run.journal, run.backend, tensorboard),
        searcher=SearcherContext(
            distributed, run.backend, record=run.journal.record, units=run.units, metric=run.metric,
            smaller_is_better=run.smaller_is_better,
        ),
        profiler=ProfilerContext(distributed, run.journal.metrics, agent_id=run.agent_id),
        run=run,
        last_commit=lambda: observer.last_commit,
    )  # fmt: skip
    preempt.start()
    return context


def _tensorboard_files(run: Run, rank: int, start: StartCheckpoint, mode: TensorboardMode | None) -> TensorboardFiles:
    prefix = run.tensorboard_prefix
    return TensorboardFiles(
        resolve_mode(mode),
        journals=lambda: rank_cursors(run.path, run.journal_restart, rank, name="drawn", run_id=run.journal.run_id),
        flush_journal=run.journal.flush,
        local=run.path / "tensorboard" / f"rank-{rank}",
        put=None if prefix is None else lambda source, name: run.store.put_file(source, f"{prefix}/{name}"),
        where=f"{run.store.root}/{prefix}",
        rank=rank,
        is_resumed=run.latest_checkpoint is not None,
        start_step=lambda: start.steps_completed,
    )


def _record_start(distributed: DistributedContext, run: Run) -> None:
    """Write the first records of this rank's journal: the process and its settings."""
    start = {"size": distributed.size, "host": os.uname().nodename, "pid": os.getpid(), "storage": run.storage}
    if not run.managed:
        # Says that a record without should_preempt() calls means that there were none: older versions recorded none.
        start["notes_should_preempt"] = True
    run.journal.record("run_start", start)
    if distributed.rank == 0 and (run.hparams or run.restart) and not run.managed:
        run.journal.record("settings", {"hparams": to_recordable("hparams", run.hparams)})


def _validate(
    distributed: Any,
    preempt_mode: Any,
    tensorboard_mode: Any,
    hparams: Any,
    texts: Mapping[str, Any],
    environment: Environment,
) -> None:
    """Check arguments before anything is created."""
    if distributed is not None and not isinstance(distributed, DistributedContext):
        raise TypeError(f"distributed must be a core.DistributedContext, not {type(distributed).__name__}")
    if not isinstance(preempt_mode, PreemptMode):
        raise TypeError(f"preempt_mode must be a core.PreemptMode, not {preempt_mode!r}")
    if tensorboard_mode is not None and not isinstance(tensorboard_mode, TensorboardMode):
        raise TypeError(f"tensorboard_mode must be a core.TensorboardMode, not {tensorboard_mode!r}")
    if hparams is not None and not isinstance(hparams, Mapping):
        raise TypeError(f"hparams must be a mapping, not {type(hparams).__name__}")
    for argument, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{argument}={value!r}: expected a non-empty string or None")
    if isinstance(name := texts["name"], str) and not is_printable(name):
        raise ValueError(f"{name=}: expected one line of printable text")
    if distributed is None and (launcher := detect_ranks(environment.launch)) is not None:
        raise ValueError(
            f"{launcher.command} started {launcher.size()} processes, so core.init() needs to know the ranks: "
            f"core.init(distributed={launcher.constructor}), or core.DistributedContext.detect() for any launcher"
        )
    check_process_group(1 if distributed is None else distributed.size)
