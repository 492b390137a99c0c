"""Docking to the core: every call that a Trainer makes of ``core.init()``'s context, and the agreement of its ranks."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core.accelerated import _state
from det_core.accelerated._data import length_of
from det_core.accelerated._events import NAN_LOSS
from det_core.accelerated.tracking import RunHistory

if TYPE_CHECKING:
    from det_core import core
    from det_core.accelerated._loop import TrainingLoop

PREEMPTIONS = ("signal", "master")
"""The reasons of a stop after which the trial goes on later."""
PROGRESS_EVERY = 64
"""Updates between two looks at the clock, for reports of progress at most once a second."""


def open_context(given: core.Context | None) -> core.Context | None:
    """The context to train in: the one given, else the one that is open. Imports nothing if nobody has."""
    if given is not None or "det_core.core._context" not in sys.modules:
        return given
    from det_core import core

    return core.current_context()


class Ranks:
    """The ranks that a launcher started, and their agreement on when to stop; in place of a context's."""

    def __init__(self) -> None:
        from det_core import core

        self.distributed = core.DistributedContext.detect()
        self.preempt = core.PreemptContext(self.distributed)


class Managed:
    """A trial's training runs under one context: resumes, reports, checkpoints, operations of a search.

    Args:
        context: the context.
    """

    def __init__(self, context: core.Context) -> None:
        self.context: core.Context = weakref.proxy(context)  # which has the key of what holds this
        self.has_left = False
        """Whether a run was preempted: what a script does after it waits until it is resumed."""
        self.due = 0
        """Updates of the run at which :meth:`after_update` has something to do."""
        info = context.info
        self.trial = info.trial if context.managed and info is not None else None
        """None in a bare run."""
        self._trial_id = 0 if self.trial is None else self.trial.trial_id
        self._chief = context.distributed.rank == 0
        self._number = 0
        self._steps = 0
        self._saved_at = (0, 0, 0, False)
        self._has_stopped = False
        self._has_resumed = False
        self._reported: dict[str, tuple[int, set[str]]] = {}
        self._counts: dict[str, int] = {}
        self._operations: Any = None
        self._operation: core.SearcherOperation | None = None
        self._said_at = 0.0
        self._epoch_clock = (0.0, 0)

    @classmethod
    def of(cls, context: core.Context) -> Managed:
        """The one of a context, which counts the runs of all its Trainers."""
        if context not in _MANAGED:
            _MANAGED[context] = cls(context)
        return _MANAGED[context]

    # a run begins and ends

    def begin(self, trainer: TrainingLoop, resume_from: Any) -> bool:
        """Restore what this run goes on from; False: it had ended before this process was started, or is for after a
        preemption."""
        if self.has_left:
            trainer.print("The training before was preempted: this one begins after the resume")
            trainer.preempted = True
            return False
        self._number += 1
        self._has_stopped = False
        trainer._run.base, self._counts = self._steps, counts_of(trainer.run_history)
        self._saved_at = self._place(trainer)
        if resume_from is None and not self._has_resumed and self.context.latest_checkpoint is not None:
            with self.context.checkpoint.resume(only_listed=True) as folder:
                assert folder is not None
                counters = _state.read_counters(folder)
                number = counters["run"]
                if counters["trial_id"] != self._trial_id:
                    _state.apply(trainer, folder, counters, anew=True)
                    trainer.print("Begun with the model and the optimizer of another trial's checkpoint")
                elif number > self._number:
                    fits = _state.pass_over(trainer, folder, counters)
                    trainer.print(
                        f"Training run {self._number} of this script had ended before: going on to the next, with the "
                        + (f"model of run {number}" if fits else "model as it is: the checkpoint has another")
                    )
                    return False
                elif number == self._number:
                    self._restore(trainer, folder, counters)
            self._has_resumed = True
        if self._chief:
            self.context.train.set_status("training")
        if trainer._profile:
            self.context.profiler.on()
        return True

    def _restore(self, trainer: TrainingLoop, folder: Any, counters: Mapping[str, Any]) -> None:
        _state.apply(trainer, folder, counters)
        for callback in trainer.callback_handler:
            if hasattr(callback, "restore_files"):
                callback.restore_files(folder)
        run, stopped = trainer._run, bool(counters.get("stopped"))
        self._has_stopped = run.left = stopped  # nothing is left to train
        self._saved_at, self._counts = self._place(trainer), counts_of(trainer.run_history)
        where = f"at batch {run.batch} of epoch {run.epoch + 1}" if run.epoch < run.num_epochs else "at the end"
        where += ", where it was stopped for good" if stopped else ""
        if run.epoch >= run.num_epochs:
            where += " (a run of another name or home begins anew)"
        trainer.print(f"Resumed {where}, after {trainer.steps_completed} updates")

    def start(self, trainer: TrainingLoop) -> None:
        """Take the first operation of a search, once callbacks have their states back."""
        if self.context.managed:
            self._operations = iter(self.context.searcher.operations())
            self._next_operation(trainer)
            self._complete_reached(trainer)
        self._plan(trainer)

    def end(self, trainer: TrainingLoop, stopped: Exception | None) -> None:
        """Complete an operation that is open, and save what is not saved; after a NaN neither."""
        if stopped is not None and str(stopped).startswith(NAN_LOSS):
            return
        self._has_stopped = self._has_stopped or stopped is not None
        self._complete(trainer, best=self._has_stopped)
        self.save(trainer)

    def close(self, trainer: TrainingLoop, stopped: Exception | None) -> None:
        """However the run has ended, after all callbacks; a trial whose loss was NaN is not worth repeating."""
        self._steps = trainer.steps_completed
        if trainer._profile:
            self.context.profiler.off()
        if self._chief and stopped is not None and str(stopped).startswith(NAN_LOSS):
            from det_core import core

            self.context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)

    # in a run

    def after_update(self, trainer: TrainingLoop) -> None:
        """Report, save, complete an operation: what is due after this update."""
        run = trainer._run
        if run.batch != run.length:  # else the epoch's report is of this update too, and a stop would part the two
            self._report_window(trainer)
        self._complete_reached(trainer)
        if isinstance(run.checkpoint_every, int) and run.updates % run.checkpoint_every == 0:
            self.save(trainer)
        self._say_progress(trainer, now=False)
        self._plan(trainer)

    def after_epoch(self, trainer: TrainingLoop) -> None:
        """Save, complete an operation, say how far this is."""
        self._say_progress(trainer, now=True)
        self._complete_reached(trainer)
        if trainer._run.checkpoint_every == "epoch":
            self.save(trainer)
        self._plan(trainer)

    def _plan(self, trainer: TrainingLoop) -> None:
        run = trainer._run
        periods = (PROGRESS_EVERY, run.report_every, run.checkpoint_every)
        self.due = min((run.updates // period + 1) * period for period in periods if isinstance(period, int))
        if self._operation is not None and (target := self._target(trainer)) is not None:
            self.due = min(self.due, target - run.base)

    def save(self, trainer: TrainingLoop) -> None:
        """Save a checkpoint, in the background, unless this place in the training is saved already."""
        if self._saved_at == self._place(trainer):
            return
        self._saved_at = self._place(trainer)
        everyone = self.context.distributed.gather(_state.own(trainer))
        if everyone is None:
            return
        files: dict[str, Any] = {f"rng_rank{rank}.pth": state for rank, state in enumerate(everyone)}
        files[_state.COUNTERS] = _state.counters(trainer, self._number, self._trial_id, self._has_stopped)
        for callback in trainer.callback_handler:
            if hasattr(callback, "checkpoint_files"):
                files.update(callback.checkpoint_files())
        history, metric = trainer.run_history, self.context.searcher.metric
        metadata: dict[str, Any] = {"steps_completed": trainer.steps_completed, "epoch": history.current_epoch}
        if metric in history.get_metric_names():
            metadata[str(metric)] = self._metric(trainer)
        self.context.checkpoint.save(_state.whole(trainer), metadata, files=files, blocking=False)

    def _place(self, trainer: TrainingLoop) -> tuple[int, int, int, bool]:
        return trainer.steps_completed, trainer._run.epoch, trainer._run.batch, self._has_stopped

    # the operations of a search

    def _next_operation(self, trainer: TrainingLoop) -> None:
        self._operation = next(self._operations, None)
        if self._operation is None:
            trainer._run.ended, trainer._run.left = True, bool(trainer._run.batch)
            return
        epochs, limit = self._operation.length, trainer._run.num_epochs
        if self._size(trainer) is None and epochs > limit:
            trainer.print(f"The search asks for {epochs} epochs: num_epochs={limit} ends the training before")

    def _size(self, trainer: TrainingLoop) -> int | None:
        """What an update counts in the unit of the search; None: that is epochs."""
        from det_core import core

        unit, size = self.context.searcher.get_configured_units(), trainer.run_config.train_total_batch_size
        if unit is core.Unit.RECORDS and size is None:
            raise ValueError("a search in records needs a loader with a batch size: give its lengths in batches")
        return 1 if unit is core.Unit.BATCHES else size if unit is core.Unit.RECORDS else None

    def _target(self, trainer: TrainingLoop) -> int | None:
        """The updates after which the operation is reached; None: it is counted in epochs."""
        assert self._operation is not None
        size = self._size(trainer)
        return None if size is None else max(self._operation.length // size, 1)

    def _complete_reached(self, trainer: TrainingLoop) -> None:
        """Complete the operations whose length is reached."""
        run = trainer._run
        if run.batch and run.batch == length_of(trainer._train_dataloader):
            return  # the epoch's end evaluates, and looks again
        while self._operation is not None:
            target = self._target(trainer)
            in_epochs = not run.batch and run.epoch >= self._operation.length
            if not (in_epochs if target is None else trainer.steps_completed >= target):
                break
            if trainer.eval_dataset is not None and run.batch:  # an epoch's end has evaluated already
                trainer._run_eval_epoch(trainer._eval_dataloader)
            self._complete(trainer)
            self.save(trainer)
            self._next_operation(trainer)

    def _complete(self, trainer: TrainingLoop, best: bool = False) -> None:
        operation, self._operation = self._operation, None
        if self._chief and operation is not None:
            operation.report_completed(self._metric(trainer, best))

    def _metric(self, trainer: TrainingLoop, best: bool = False) -> float:
        """The searched-over metric's latest value in the history, or its best."""
        searcher, history = self.context.searcher, trainer.run_history
        names = list(history.get_metric_names())
        if searcher.metric not in names:
            raise ValueError(
                f"the search is over the metric {searcher.metric!r}, and the history has {', '.join(names) or 'none'}"
            )
        values = [float(value) for value in history.get_metric_values(searcher.metric)]
        numbers = [value for value in values if value == value]
        return values[-1] if not best or not numbers else (min if searcher.smaller_is_better else max)(numbers)

    def _say_progress(self, trainer: TrainingLoop, *, now: bool) -> None:
        clock = time.monotonic()
        if not self._chief or (clock - self._said_at < 1.0 and not now):
            return
        self._said_at = clock
        run = trainer._run
        if self._operation is not None:
            size = self._size(trainer)
            self._operation.report_progress(run.epoch if size is None else trainer.steps_completed * size)
        elif not self.context.managed:
            part = run.batch / run.length if run.length else 0.0
            self.context.train.report_progress(min(1.0, (run.epoch + part) / run.num_epochs))

    # reports

    def start_epoch(self, trainer: TrainingLoop) -> None:
        """Measure an epoch's speed from here."""
        self._epoch_clock = (time.monotonic(), trainer._loss_tracker.running_count)

    def report_epoch(self, trainer: TrainingLoop) -> None:
        """Report an epoch's training metrics."""
        self._report_window(trainer)
        if not self._chief:
            return
        history, (began, before) = trainer.run_history, self._epoch_clock
        updated, self._counts = recorded_since(history, self._counts), counts_of(history)
        metrics = {name: value for name, value in updated.items() if "train" in name}
        samples = (trainer._loss_tracker.running_count - before) * trainer._strategy.num_processes
        metrics |= {"epoch": history.current_epoch, **learning_rates(trainer)}
        if (seconds := time.monotonic() - began) > 0 and samples:
            metrics["samples_per_second"] = samples / seconds
        self._report("training", trainer.steps_completed, metrics)

    def _report_window(self, trainer: TrainingLoop) -> None:
        """If it is time, report the mean loss of all ranks since the last such report in this epoch; no device is
        waited for."""
        run, tracker = trainer._run, trainer._loss_tracker
        total, count = tracker.total_loss, tracker.running_count
        if not run.report_every or run.updates % run.report_every or count == run.window[1]:
            return
        sums = trainer._strategy.sums([total - run.window[0], count - run.window[1]])
        run.window = (total, count)
        if self._chief:
            self._report(
                "training", trainer.steps_completed, {"train_loss": sums[0] / sums[1], **learning_rates(trainer)}
            )

    def report_evaluation(self, trainer: TrainingLoop, before: Mapping[str, int], group: str) -> None:
        """Report what an evaluation has recorded.

        Args:
            trainer: the trainer.
            before: how many values each metric had before it.
            group: ``validation`` or ``evaluation``.
        """
        if not self._chief:
            return
        again = self._report(group, trainer.steps_completed, recorded_since(trainer.run_history, before))
        if again and group == "evaluation":
            trainer.print(
                f"Not reported, as there is a report of an evaluation at step {trainer.steps_completed} already: "
                + ", ".join(again)
            )

    def _report(self, group: str, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Report metrics, at one step each name once, as a second value would be an error; those left out."""
        at, names = self._reported.get(group, (-1, set()))
        new = {name: value for name, value in metrics.items() if at != step or name not in names}
        self._reported[group] = (step, set(new) | (names if at == step else set()))
        if not new:
            return list(metrics)
        self.context.train.report_metrics(group, step, new)
        return [name for name in metrics if name not in new]


_MANAGED: weakref.WeakKeyDictionary[core.Context, Managed] = weakref.WeakKeyDictionary()
"""By context, since a script may train several times, by several Trainers, and its runs are counted."""


def counts_of(history: RunHistory) -> dict[str, int]:
    """How many values each metric has."""
    return {name: len(history.get_metric_values(name)) for name in history.get_metric_names()}


def recorded_since(history: RunHistory, before: Mapping[str, int]) -> dict[str, Any]:
    """The latest values of metrics that have more values than ``before``."""
    more = [name for name, count in counts_of(history).items() if count > before.get(name, 0)]
    return {name: history.get_latest_metric(name) for name in more}


def learning_rates(trainer: TrainingLoop) -> dict[str, float]:
    """The rate of each parameter group."""
    rates = [
        float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups if "lr" in group
    ]
    return {"learning_rate": rates[0]} if len(rates) == 1 else {f"learning_rate_{i}": r for i, r in enumerate(rates)}
