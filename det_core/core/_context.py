"""Context: all parts of the SDK for one script, opened and closed together."""

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
UNCLOSED_DETAIL = "not closed, so the outcome is unknown: use `with core.init() as ctx:` or ctx.close()"
WORKER_LOST = (
    "nothing was saved after the signal to stop: it also reached a DataLoader worker that was still starting, and the "
    "loader failed; a resume repeats the training since the last checkpoint. To avoid this, signal the script alone: "
    "kill PID"
)
_ALERT_LEVELS = ("debug", "info", "warning", "error")


class Context:
    """Entry point of the Core API; see :func:`init`.

    Attributes:
        distributed: the ranks and their collectives.
        checkpoint: stores and restores checkpoints.
        preempt: decides when to save and exit.
        train: reports metrics, status and metadata.
        searcher: returns the operations to train.
        profiler: samples the node.
        info: the task in the cluster; None in a bare run.
        managed: whether this is a trial of an experiment, under a master; False in a bare run.
        trial: the trial of an experiment, with its ID and its seed; None in a bare run.
        hparams: hyperparameters of this trial; in a bare run those of ``core.init(hparams=)``.
        config: the experiment's configuration; in a bare run the argument of :meth:`set_config`, None before.
        run_id: ID of this run for ``det-core runs``.
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
        self.trial = None
        if run.managed and run.info is not None:
            self.trial = run.info.trial
        self.managed = run.managed
        self.hparams = run.hparams
        self.config: dict[str, Any] | None = None
        if self.trial is not None:
            self.config = self.trial.config
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
            raise ContextClosed("this context is closed: call core.init() again for another run")
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
        """storage_id of the checkpoint to start from, or None."""
        return self._start.storage_id

    @property
    def steps_completed(self) -> int:
        """Steps of the checkpoint to start from; 0 without one."""
        return self._start.steps_completed

    @property
    def last_validation(self) -> int | None:
        """Last step of a reported validation, in any restart, or None. Any rank may read it.

        In a bare run superseded rows do not count: those after the checkpoint that was restored.
        """
        if self._closed:
            raise ContextClosed("last_validation was read from a context that is closed")
        return self._run.backend.last_validation()

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Record the settings of the script for ``det-core runs show``. Any rank may call it.

        In a bare run they become ``ctx.config``; in a trial that remains the experiment's configuration.

        Args:
            config: settings, such as ``vars(args)``; replaces those of earlier calls. Values that JSON cannot hold are
                recorded as their ``str()``.
        """
        if self._closed:
            raise ContextClosed("set_config() was called on a context that is closed")
        recorded = to_recordable("config", config)
        self._run.journal.record("settings", {"config": recorded})
        if self.managed:
            return
        self.config = dict(config)
        if not self._earlier_config:
            return
        changed = changed_settings(self._earlier_config, recorded)
        if changed is not None:
            self._earlier_config = {}  # one notice a start, however often the script sets its configuration
            print_notice(f"run {self.run_id} was started with the config {changed[0]}; resuming with {changed[1]}")

    def alert(self, title: str | None = None, description: str | None = None, level: str = "info") -> None:
        """Send an alert: through the master, or in a bare run as a line in the log.

        Args:
            title: one line.
            description: further text.
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
        """Close every part, even if another one fails.

        Raises:
            ReportsLost: If reports reached no disk, and nothing else failed.
            ReportsNotShipped: If reports did not reach the master, and nothing else failed.
            CloseError: If several parts, or another part, failed; the message names each.
        """
        self._close(None)

    def _close_unclosed(self) -> None:
        """Close a context that the script left open: commit its saves and keep its reports.

        The outcome is unknown here: there is neither an exit status nor an exception.
        """
        try:
            self._close(None, unclosed=True)
        except BaseException as e:
            print_notice(f"run {self.run_id}: {type(e).__name__}: {e}")

    def _end_job(self, error: InvalidHP) -> None:
        """Report the early exit, and make every other rank exit with status 0 as well."""
        self.train.report_early_exit(EarlyExitReason.INVALID_HP)
        if self.distributed.communicator is not None:
            reason = f"rank {self.distributed.rank} raised InvalidHP: {error}"
            self.distributed.communicator.end_job("invalid_hp", reason)

    def _close(self, error: BaseException | None, *, unclosed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        outcome = "unclosed"
        detail = UNCLOSED_DETAIL
        if not unclosed:
            outcome, detail = self._outcome(error)
        reported = self._run.journal.newest_step
        failures: dict[str, BaseException] = {}
        # Parts that may still report or save close first; the journal and the master last, as all others end in them.
        interrupt = _finish(self._sources(), failures)
        if outcome in ("preempted", "stopped") and (unsaved := self._unsaved(reported)):
            detail = f"{detail}; {unsaved}" if detail else unsaved
        interrupt = _finish(self._sinks(outcome, detail, error), failures) or interrupt
        if self.distributed.rank == 0:
            self._print_end(outcome, detail, failures)
            if is_worker_loss(error) and self._is_unsaved_since(self.preempt.requested_at):
                print_notice(WORKER_LOST)
        drop_unwritable()
        if interrupt is not None:
            raise interrupt
        if len(failures) == 1:
            (failure,) = failures.values()
            if isinstance(failure, (ReportsLost, ReportsNotShipped)):
                raise failure
        if failures:
            raise CloseError(failures)

    def _print_end(self, outcome: str, detail: str, failures: Mapping[str, BaseException]) -> None:
        if outcome in SUCCESS_OUTCOMES:
            # The journal records the same outcome itself.
            if isinstance(lost := failures.get("journal"), ReportsLost):
                outcome = "incomplete"
                detail = str(lost)
            elif damage := self._run.journal.damage:
                outcome = "incomplete"
                detail = f"not all reports were kept: {damage}"
        print_notice(self._run.end_notice(outcome, detail))

    def _sources(self) -> list[_Closer]:
        """Return the parts that may still report or save, with their close functions, in order."""
        return [
            ("profiler", self.profiler.close),
            ("searcher", self.searcher.close),
            ("checkpoint", self.checkpoint.close),
            ("preempt", self.preempt.close),
            ("train", self.train.close),
            *(("checkpoint store", store.close) for store in (self._run.store, *self._run.other_stores.values())),
        ]

    def _sinks(self, outcome: str, detail: str, error: BaseException | None) -> list[_Closer]:
        """Return the parts that take in reports, with their close functions, in order: the ranks, then the journal."""
        failure = None
        if outcome in ("failed", "interrupted"):
            failure = error
        end = {"outcome": outcome}
        if detail:
            end["detail"] = detail
        records: list[_Closer] = []
        # A master takes the outcome of an unclosed run from the status of the process.
        if not self.managed or outcome != "unclosed":
            records.append(("run", lambda: self._run.journal.record("run_end", end)))
        return [
            *records,
            ("distributed", lambda: self.distributed.close(exit_info=end, failure=failure)),
            ("journal", self._run.journal.close),
            ("master", self._run.backend.close),
            ("run folder", self._run.release),
        ]

    def _unsaved(self, reported: int) -> str:
        """Return what a stop leaves unsaved, in words; "" if the script has saved, or reported nothing since.

        Args:
            reported: the largest step that was reported.
        """
        if self.distributed.rank != 0:  # the chief commits checkpoints
            return ""
        # Steps alone do not decide: a script may count batches in its reports, and epochs in its checkpoints.
        if not self._is_unsaved_since(self.preempt._stop_seen_at or 0.0):
            return ""
        if (commit := self._last_commit()) is not None:
            steps = commit[0]
        elif self.latest_checkpoint is not None:
            steps = self.steps_completed
        else:
            return "nothing was saved, so a resume starts from the beginning"
        if reported <= steps:
            return ""
        return f"nothing was saved since step {steps}, from which a resume continues"

    def _is_unsaved_since(self, moment: float | None) -> bool:
        """Return whether the chief has committed nothing since a moment on the monotonic clock; False without one."""
        commit = self._last_commit()
        return moment is not None and (commit is None or commit[1] < moment)

    def _outcome(self, error: BaseException | None) -> tuple[str, str]:
        """Return the run's outcome and its detail."""
        if isinstance(error, InvalidHP):
            return "invalid_hp", str(error)
        if isinstance(error, KeyboardInterrupt):
            return "interrupted", ""
        is_success = error is None or isinstance(error, GeneratorExit)
        if isinstance(error, SystemExit) and error.code in (0, None):
            is_success = True
        if not is_success:
            return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            exit_if_job_ended(self.distributed)
        except SystemExit:
            return "invalid_hp", "reported by another rank"
        for rank, exit_info in sorted(self.distributed.departed().items()):
            if exit_info.get("outcome") == "failed":
                return "failed", f"rank {rank}: {exit_info.get('detail')}"
        if self.preempt.acknowledged:
            return "preempted", ""
        if self.preempt.stopped_by_script:
            return "stopped", self.preempt.reason or ""
        if isinstance(error, GeneratorExit):
            return "stopped", "its generator was closed before the end"
        return "completed", ""


_Closer = tuple[str, Callable[[], None]]


def _finish(parts: list[_Closer], failures: dict[str, BaseException]) -> KeyboardInterrupt | None:
    """Close each part, even if another one fails; collect the failures by part, and return a KeyboardInterrupt."""
    interrupt: KeyboardInterrupt | None = None
    for part, finish in parts:
        try:
            finish()
        except KeyboardInterrupt as e:  # it ends the wait of one part, not the closing of the others
            interrupt = e
        except Exception as e:
            failures[part] = e
    return interrupt


_CURRENT: ContextVar[Context | None] = ContextVar("det_core_context", default=None)
_OPEN: set[Context] = set()
"""Contexts of this process that are not closed. Strong references: the script may have lost its own."""


def _register_open(context: Context) -> None:
    """Register a context, to be closed when the main thread has ended if the script does not close it."""
    _OPEN.add(context)
    end_in_time(_close_unclosed)


def _close_unclosed() -> None:
    for context in list(_OPEN):
        if context._pid == os.getpid():  # a forked child leaves them to its parent
            context._close_unclosed()


def current_context() -> Context | None:
    """Return the context of the innermost ``with core.init()`` around the caller, else the only open one, or None.

    For libraries that are called inside a training script without the context as an argument.

    Raises:
        RuntimeError: If several are open in this process, and none encloses the call.
    """
    context = _CURRENT.get()
    while context is not None:
        if not context._closed:
            return context
        context = context._outer
    contexts = [context for context in list(_OPEN) if not context._closed]
    if not contexts:
        return None
    if len(contexts) > 1:
        raise RuntimeError(f"{len(contexts)} contexts are open and none encloses this call: pass core_context=")
    return contexts[0]
