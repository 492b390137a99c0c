"""The Context: all parts of the SDK for one script, opened and closed together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from det_core._info import ClusterInfo
from det_core._notices import drop_unwritable, print_notice
from det_core._standalone.stop_signals import is_worker_loss
from det_core.core._checkpoint import CheckpointContext, StartCheckpoint
from det_core.core._distributed import DistributedContext
from det_core.core._end import end_in_time, note_status
from det_core.core._preemption import PreemptContext
from det_core.core._profiler import ProfilerContext
from det_core.core._rank_group import exit_if_job_ended
from det_core.core._run import Run, changed_settings, to_recordable
from det_core.core._searcher import SearcherContext
from det_core.core._train import EarlyExitReason, TrainContext
from det_core.errors import CloseError, ContextClosed, InvalidHP, ReportsLost, ReportsNotShipped
from det_core.journal import SUCCESS_OUTCOMES

logger = logging.getLogger("det_core.core")
UNCLOSED_DETAIL = (
    "it was not closed, so whether it completed is not known: use `with core.init() as ctx:`, or ctx.close()"
)
WORKER_LOST = (
    "nothing was saved after the signal to stop: it also reached a DataLoader worker that was still starting, and the "
    "loader failed; what was trained since the last checkpoint is lost, and trained again by a resume. Next time, "
    "signal the script alone: kill PID"
)
_ALERT_LEVELS = ("debug", "info", "warning", "error")


class Context:
    """What ``core.init()`` gives: one part for each thing a training script needs. Not made by hand.

    Attributes:
        distributed: talks to the other ranks.
        checkpoint: stores and restores.
        preempt: says when to save and exit.
        train: reports metrics, status and metadata.
        searcher: says what to train.
        profiler: samples the machine.
        info: what the cluster says of this task; None in a bare run.
        managed: whether this is a trial of an experiment, under a master; False in a bare run.
        trial: the trial of an experiment, with its id and its seed; None in a bare run.
        hparams: the hyperparameters of this trial; in a bare run those that ``core.init(hparams=)`` was given.
        config: the experiment's configuration; in a bare run what :meth:`set_config` was given, None before.
        run_id: what ``det-core runs`` knows this run by.
    """

    def __init__(
        self,
        *,
        distributed: DistributedContext,
        checkpoint: CheckpointContext,
        start: StartCheckpoint,
        preempt: PreemptContext,
        train: TrainContext,
        searcher: SearcherContext,
        profiler: ProfilerContext,
        run: Run,
        last_commit: Callable[[], tuple[int, float] | None],
    ) -> None:
        self.distributed = distributed
        self.checkpoint = checkpoint
        self.preempt = preempt
        self.train = train
        self.searcher = searcher
        self.profiler = profiler
        self.info: ClusterInfo | None = run.info
        self.trial = trial = run.info.trial if run.managed and run.info is not None else None
        self.managed = run.managed
        self.hparams = run.hparams
        self.config: dict[str, Any] | None = None if trial is None else trial.config
        self.run_id = run.run_id
        self._run = run
        self._start = start
        self._last_commit = last_commit
        self._earlier_config = run.earlier_config
        self._closed = False
        self._outer: Context | None = None
        self._pid = os.getpid()
        _register_open(self)

    def __enter__(self) -> Context:
        if self._closed:
            raise ContextClosed("this context is closed; each run needs a core.init() of its own")
        self._outer = _CURRENT.get()
        _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _CURRENT.get() is self:
            _CURRENT.set(self._outer)
        if isinstance(error, InvalidHP):
            self._end_job(error)
        note_status(error)
        try:
            self._close(error)
        except Exception as failure:
            if error is None:
                raise
            logger.error("after %s: %s", type(error).__name__, failure)
            if hasattr(error, "add_note"):
                error.add_note(str(failure))
        if isinstance(error, InvalidHP):
            raise SystemExit(0) from error

    @property
    def latest_checkpoint(self) -> str | None:
        """The storage_id to start from; None: from scratch."""
        return self._start.storage_id

    @property
    def steps_completed(self) -> int:
        """The steps of the checkpoint to start from; 0 without one."""
        return self._start.steps_completed

    @property
    def last_validation(self) -> int | None:
        """The last step at which a validation was reported, by any restart; None: none was. Any rank may ask.

        In a bare run that is of the rows that stand: once an earlier checkpoint is restored, later ones do not.
        """
        if self._closed:
            raise ContextClosed("last_validation was asked of a context that is closed")
        return self._run.backend.last_validation()

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Put the settings that the script goes by into the run's record (``det-core runs show``). Any rank may.

        In a bare run they are ``ctx.config`` from then on; in a trial that stays the experiment's.

        Args:
            config: such as ``vars(args)``; a later call takes the place of an earlier one. What JSON cannot hold is
                recorded as its ``str()``.
        """
        if self._closed:
            raise ContextClosed("set_config() was called on a context that is closed")
        recorded = to_recordable("config", config)
        self._run.journal.record("settings", {"config": recorded})
        if self.managed:
            return
        self.config = dict(config)
        changed = changed_settings(self._earlier_config, recorded) if self._earlier_config else None
        if changed is not None:
            self._earlier_config = {}
            print_notice(f"run {self.run_id} was started with the config {changed[0]}; resuming with {changed[1]}")

    def alert(self, title: str | None = None, description: str | None = None, level: str = "info") -> None:
        """Bring something to a person's attention: by the master, or in a bare run by a line in the log.

        Args:
            title: one line.
            description: more, if there is more.
            level: ``debug``, ``info``, ``warning`` (or ``warn``) or ``error``.
        """
        if self._closed:
            raise ContextClosed("alert() was called on a context that is closed")
        chosen = "warning" if str(level).lower() == "warn" else str(level).lower()
        if chosen not in _ALERT_LEVELS:
            raise ValueError(f"level={level!r}: expected one of {', '.join(_ALERT_LEVELS)}")
        if not title and not description:
            raise ValueError("an alert needs a title or a description")
        self._run.journal.record("alert", {"title": title or "", "description": description or "", "level": chosen})
        self._run.backend.alert(title or "", description or "", chosen)

    def close(self) -> None:
        """Close every part, also if another fails to.

        Raises:
            ReportsLost: reports that reached no disk, when nothing else went wrong.
            ReportsNotShipped: reports that the master did not get, likewise.
            CloseError: names each part that could not finish.
        """
        self._close(None)

    def _close_unclosed(self) -> None:
        """Close what the script has left open: its saves are committed and its reports kept, but how it ended is not
        known here, neither by a status nor by an exception."""
        try:
            self._close(None, unclosed=True)
        except BaseException as e:
            print_notice(f"run {self.run_id}: {type(e).__name__}: {e}")

    def _end_job(self, error: InvalidHP) -> None:
        """Report the early exit, and tell every other rank to exit with status 0 as well."""
        self.train.report_early_exit(EarlyExitReason.INVALID_HP)
        if self.distributed.communicator is not None:
            reason = f"rank {self.distributed.rank} raised InvalidHP: {error}"
            self.distributed.communicator.end_job("invalid_hp", reason)

    def _close(self, error: BaseException | None, *, unclosed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        outcome, detail = ("unclosed", UNCLOSED_DETAIL) if unclosed else self._outcome(error)
        reported = self._run.journal.newest_step
        failures: dict[str, BaseException] = {}
        interrupt = _finish(self._sources(), failures)
        if outcome in ("preempted", "stopped") and (unsaved := self._unsaved(reported)):
            detail = f"{detail}; {unsaved}" if detail else unsaved
        interrupt = _finish(self._sinks(outcome, detail, error), failures) or interrupt
        if self.distributed.rank == 0:
            if isinstance(lost := failures.get("journal"), ReportsLost) and outcome in SUCCESS_OUTCOMES:
                outcome, detail = "incomplete", str(lost)  # as the journal itself records it
            elif (damage := self._run.journal.damage) and outcome in SUCCESS_OUTCOMES:
                outcome, detail = "incomplete", f"not all reports were kept: {damage}"
            print_notice(self._run.end_notice(outcome, detail))
            if is_worker_loss(error) and self._is_unsaved_since(self.preempt.requested_at):
                print_notice(WORKER_LOST)
        drop_unwritable()
        if interrupt is not None:
            raise interrupt
        if len(failures) == 1 and isinstance(only := next(iter(failures.values())), (ReportsLost, ReportsNotShipped)):
            raise only
        if failures:
            raise CloseError(failures)

    def _sources(self) -> list[_Closer]:
        """Return each part that may still report or save, with what closes it, in order."""
        return [
            ("profiler", self.profiler.close),
            ("searcher", self.searcher.close),
            ("checkpoint", self.checkpoint.close),
            ("preempt", self.preempt.close),
            ("train", self.train.close),
            *(("checkpoint store", store.close) for store in (self._run.store, *self._run.other_stores.values())),
        ]

    def _sinks(self, outcome: str, detail: str, error: BaseException | None) -> list[_Closer]:
        """Return each part that takes reports, with what closes it, in order: the ranks' links, then the journal."""
        failure = error if outcome in ("failed", "interrupted") else None
        says_nothing = self.managed and outcome == "unclosed"  # the master goes by the status of the process
        end = {"outcome": outcome, **({"detail": detail} if detail else {})}
        return [
            *([] if says_nothing else [("run", lambda: self._run.journal.record("run_end", end))]),
            ("distributed", lambda: self.distributed.close(exit_info=end, failure=failure)),
            ("journal", self._run.journal.close),
            ("master", self._run.backend.close),
            ("run folder", self._run.release),
        ]

    def _unsaved(self, reported: int) -> str:
        """Return what a stop leaves unsaved, in words; empty where the script has saved, or reported nothing since.

        Args:
            reported: the largest step that was reported.
        """
        if self.distributed.rank != 0:  # the chief commits checkpoints
            return ""
        # Steps alone do not tell: a script may count batches in its reports, and epochs in its checkpoints.
        if not self._is_unsaved_since(self.preempt._stop_seen_at or 0.0):
            return ""
        steps = None if self.latest_checkpoint is None else self.steps_completed
        if (commit := self._last_commit()) is not None:
            steps = commit[0]
        if steps is None:
            return "nothing was saved, so that a resume starts from the beginning"
        return f"nothing was saved since step {steps}, from which a resume goes on" if reported > steps else ""

    def _is_unsaved_since(self, moment: float | None) -> bool:
        """Return whether the chief has committed nothing since a moment on the monotonic clock; False without one."""
        commit = self._last_commit()
        return moment is not None and (commit is None or commit[1] < moment)

    def _outcome(self, error: BaseException | None) -> tuple[str, str]:
        """``completed``, ``stopped``, ``preempted``, ``invalid_hp`` or ``failed``, and what there is to say of it."""
        if isinstance(error, InvalidHP):
            return "invalid_hp", str(error)
        if isinstance(error, KeyboardInterrupt):
            return "interrupted", ""
        left = error is None or isinstance(error, GeneratorExit)
        if not left and not (isinstance(error, SystemExit) and error.code in (0, None)):
            return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            exit_if_job_ended(self.distributed)
        except SystemExit:
            return "invalid_hp", "reported by another rank"
        for rank, farewell in sorted(self.distributed.departed().items()):
            if farewell.get("outcome") == "failed":
                return "failed", f"rank {rank}: {farewell.get('detail')}"
        if self.preempt.acknowledged:
            return "preempted", ""
        if self.preempt.stopped_by_script:
            return "stopped", self.preempt.reason or ""
        if isinstance(error, GeneratorExit):
            return "stopped", "its generator was left before the end"
        return "completed", ""


_Closer = tuple[str, Callable[[], None]]


def _finish(parts: list[_Closer], failures: dict[str, BaseException]) -> KeyboardInterrupt | None:
    """Close each part, also if another fails to; note the failures by part, and return the interrupt of a wait."""
    interrupt: KeyboardInterrupt | None = None
    for part, finish in parts:
        try:
            finish()
        except KeyboardInterrupt as e:  # a part that waits gives up; the others are closed all the same
            interrupt = e
        except Exception as e:
            failures[part] = e
    return interrupt


_CURRENT: ContextVar[Context | None] = ContextVar("det_core_context", default=None)
_OPEN: set[Context] = set()
"""Those of this process that are not closed, be they forgotten by the script."""


def _register_open(context: Context) -> None:
    """Note a context, and have those that are never closed closed when the main thread has ended."""
    _OPEN.add(context)
    end_in_time(_close_unclosed)


def _close_unclosed() -> None:
    for context in list(_OPEN):
        if context._pid == os.getpid():  # a forked child leaves them to its parent
            context._close_unclosed()


def current_context() -> Context | None:
    """The context that is open here: of the innermost ``with core.init()`` around the caller, else the only open one.

    For a library that is called inside a training script, and was not handed the context.

    Raises:
        RuntimeError: several are open in this process, and none of them around the caller.
    """
    context = _CURRENT.get()
    while context is not None:
        if not context._closed:
            return context
        context = context._outer
    found = [context for context in list(_OPEN) if not context._closed]
    if len(found) > 1:
        raise RuntimeError(
            f"{len(found)} contexts of core.init() are open in this process, and none around this call: "
            "say which one is meant (core_context=)"
        )
    return found[0] if found else None
