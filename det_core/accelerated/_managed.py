"""Connection of a Trainer to the Core API and to other ranks: resumes, reports, checkpoints, searches."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._training.data_order import length_of
from det_core.accelerated import _state
from det_core.accelerated._base import TrainerBase, callbacks_of, steps_of, with_param_groups
from det_core.accelerated._data import batch_size_of
from det_core.accelerated._events import NAN_LOSS
from det_core.accelerated.tracking import RunHistory

if TYPE_CHECKING:
    from det_core import core


def open_context(given: core.Context | None) -> core.Context | None:
    """Return the given context, or the open one."""
    # Without an open context its module may not be loaded, and its import would cost every plain training.
    if given is not None or "det_core.core._context" not in sys.modules:
        return given
    from det_core import core

    return core.current_context()


class Ranks:
    """Ranks of a launcher and their agreement on stops, in place of a context's."""

    def __init__(self) -> None:
        from det_core import core

        self.distributed = core.DistributedContext.detect()
        self.preempt = core.PreemptContext(self.distributed)


class CoreBridge:
    """Training runs of a trial under one context: resumes, reports, checkpoints, search operations."""

    def __init__(self, context: core.Context) -> None:
        self.context: core.Context = weakref.proxy(context)  # a reference would keep its own key in _BRIDGES alive
        self.has_left = False
        """True once a run was preempted; later runs of the script wait for the resume."""
        info = context.info
        self.trial: Any = None
        """Information about the trial; None in a bare run."""
        self._trial_id = 0
        if context.managed and info is not None:
            self.trial = info.trial
            self._trial_id = info.trial.trial_id
        self._chief = context.distributed.rank == 0
        self._number = 0
        self.steps = 0
        """Updates of all runs so far."""
        self._is_skipping = False
        self._saved_at = (0, 0, 0, False)
        self._has_stopped = False
        self._has_resumed = False
        self._reported: dict[str, tuple[int, set[str]]] = {}
        self._counts: dict[str, int] = {}
        self._operations: Any = None
        self._operation: core.SearcherOperation | None = None
        self._progress_at = 0.0
        self._epoch_clock = (0.0, 0)

    @classmethod
    def of(cls, context: core.Context) -> CoreBridge:
        """Return the bridge of a context, which counts the runs of all its Trainers."""
        if context not in _BRIDGES:
            _BRIDGES[context] = cls(context)
        return _BRIDGES[context]

    # Start and end of a run.

    def begin(self, trainer: TrainerBase, resume_from: Any) -> bool:
        """Restore the checkpoint of this run; return whether there is something left to train."""
        if self.has_left:
            trainer.print("The training before was preempted: this one must wait for the resume")
            trainer._det_core.preempted = True
            return False
        self._number += 1
        self._has_stopped = self._is_skipping = False
        trainer._det_core.run.base = self.steps
        self._counts = counts_of(trainer.run_history)
        self._saved_at = self._position(trainer)
        if resume_from is None and not self._has_resumed:
            with self.context.checkpoint.resume(reject_unlisted=True) as folder:
                if folder is not None and not self._resume(trainer, folder):
                    return False
            self._has_resumed = True
        if self._chief:
            self.context.train.set_status("training")
        if trainer._det_core.profile:
            self.context.profiler.on()
        return True

    def _resume(self, trainer: TrainerBase, folder: Path) -> bool:
        """Restore from the directory of a checkpoint; return whether there is something left to train."""
        state = _state.read(folder)
        position = state["position"]
        if position["trial_id"] != self._trial_id:
            _state.apply(trainer, folder, state, anew=True)
            trainer.print("Begun with the model and the optimizer of another trial's checkpoint")
        elif position["run"] > self._number:
            self._is_skipping = True
            model = _state.skip_finished_run(trainer, state)
            trainer.print(f"Training run {self._number} of this script had ended before: going on, {model}")
            return False
        elif position["run"] == self._number:
            self._restore(trainer, folder, state)
        return True

    def _restore(self, trainer: TrainerBase, folder: Any, state: Mapping[str, Any]) -> None:
        _state.apply(trainer, folder, state)
        for callback in callbacks_of(trainer):
            if hasattr(callback, "restore_files"):
                callback.restore_files(folder)
        run = trainer._det_core.run
        stopped = bool(state["position"]["stopped"])
        self._has_stopped = run.is_leaving = stopped  # a stop is final
        self._saved_at = self._position(trainer)
        self._counts = counts_of(trainer.run_history)
        ended = run.epoch >= trainer.run_config.num_epochs
        where = f"at batch {run.batch} of epoch {run.epoch + 1}"
        if ended:
            where = "at the end"
        if stopped:
            where += ", where it was stopped for good (to train anew: another name=, or det-core runs rm latest)"
        elif ended:
            where += " (to train anew: another name=, or det-core runs rm latest; to train longer: more num_epochs)"
        trainer.print(f"Resumed {where}, after {steps_of(trainer)} updates")

    def start(self, trainer: TrainerBase) -> None:
        """Take the first operation of a search, after the states of callbacks are restored."""
        if self.context.managed:
            self._operations = iter(self.context.searcher.operations())
            self._next_operation(trainer)
            self._complete_reached(trainer)

    def end(self, trainer: TrainerBase) -> None:
        """Complete the open operation, and save if not saved at this position; after a NaN neither."""
        stopped = trainer._det_core.run.stopped
        if _is_nan(stopped):
            return
        self._has_stopped = self._has_stopped or stopped is not None
        self._complete(trainer, best=self._has_stopped)
        self.save(trainer)

    def close(self, trainer: TrainerBase) -> None:
        """Run after every run and all its callbacks; report a trial whose loss was NaN as not worth repeating."""
        self.steps = steps_of(trainer)
        if trainer._det_core.profile:
            self.context.profiler.off()
        if self._chief and _is_nan(trainer._det_core.run.stopped):
            from det_core import core

            self.context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)

    # Within a run.

    def after_update(self, trainer: TrainerBase) -> None:
        """Report, save and complete an operation as due after an update."""
        run = trainer._det_core.run
        if run.batch != run.length:  # the report of the epoch is at the same update, and a stop must not separate them
            self._report_window(trainer)
        self._complete_reached(trainer)
        if isinstance(run.checkpoint_every, int) and run.updates % run.checkpoint_every == 0:
            self.save(trainer)
        self._report_progress(trainer, now=False)

    def after_epoch(self, trainer: TrainerBase) -> None:
        """Report progress, complete an operation and save as due after an epoch."""
        self._report_progress(trainer, now=True)
        self._complete_reached(trainer)
        if trainer._det_core.run.checkpoint_every == "epoch":
            self.save(trainer)

    def save(self, trainer: TrainerBase) -> None:
        """Save a checkpoint in the background, unless this position is already saved."""
        if self._saved_at == self._position(trainer):
            return
        self._saved_at = self._position(trainer)
        everyone = self.context.distributed.gather(_state.rank_state(trainer))
        if everyone is None:
            return
        files: dict[str, Any] = {}
        for callback in callbacks_of(trainer):
            if hasattr(callback, "checkpoint_files"):
                files.update(callback.checkpoint_files())
        history = trainer.run_history
        metric = self.context.searcher.metric
        metadata: dict[str, Any] = {"steps_completed": steps_of(trainer), "epoch": history.current_epoch}
        if metric in history.get_metric_names():
            metadata[str(metric)] = self._metric(trainer)
        state = _state.full_state(trainer, everyone, self._number, self._trial_id, self._has_stopped)
        self.context.checkpoint.save(state, metadata, files=files, blocking=False)

    def _position(self, trainer: TrainerBase) -> tuple[int, int, int, bool]:
        return steps_of(trainer), trainer._det_core.run.epoch, trainer._det_core.run.batch, self._has_stopped

    # Operations of a search.

    def _next_operation(self, trainer: TrainerBase) -> None:
        self._operation = next(self._operations, None)
        if self._operation is None:
            trainer._det_core.run.has_ended = True
            trainer._det_core.run.is_leaving = bool(trainer._det_core.run.batch)
            return
        epochs = self._operation.length
        limit = trainer.run_config.num_epochs
        if self._size(trainer) is None and epochs > limit:
            trainer.print(f"The search asks for {epochs} epochs: num_epochs={limit} ends the training before")

    def _size(self, trainer: TrainerBase) -> int | None:
        """Return the length of an update in the unit of the search, or None for epochs."""
        from det_core import core

        unit = self.context.searcher.get_configured_units()
        if unit is core.Unit.BATCHES:
            return 1
        if unit is not core.Unit.RECORDS:
            return None
        if batch_size_of(trainer._train_dataloader) is None:
            raise ValueError("a search in records needs a loader with a batch size: give its lengths in batches")
        return trainer.run_config.train_total_batch_size

    def _target(self, trainer: TrainerBase) -> int | None:
        """Return the updates at which the operation is complete, or None if it is counted in epochs."""
        assert self._operation is not None
        size = self._size(trainer)
        if size is None:
            return None
        return max(self._operation.length // size, 1)

    def wants_evaluation(self, trainer: TrainerBase) -> bool:
        """Return whether an operation is complete within an epoch, before the evaluation at its end."""
        return bool(trainer._det_core.run.batch) and self._is_reached(trainer)

    def _is_reached(self, trainer: TrainerBase) -> bool:
        run = trainer._det_core.run
        if self._operation is None or (run.batch and run.batch == length_of(trainer._train_dataloader)):
            return False  # checked again at the end of the epoch, after its evaluation
        target = self._target(trainer)
        if target is None:
            return not run.batch and run.epoch >= self._operation.length
        return steps_of(trainer) >= target

    def _complete_reached(self, trainer: TrainerBase) -> None:
        """Complete operations that have reached their length."""
        while self._is_reached(trainer):
            self._complete(trainer)
            self.save(trainer)
            self._next_operation(trainer)

    def _complete(self, trainer: TrainerBase, best: bool = False) -> None:
        operation = self._operation
        self._operation = None
        if self._chief and operation is not None:
            operation.report_completed(self._metric(trainer, best))

    def _metric(self, trainer: TrainerBase, best: bool = False) -> float:
        """Return the latest or best value of the search metric in the history."""
        searcher = self.context.searcher
        history = trainer.run_history
        names = list(history.get_metric_names())
        if searcher.metric not in names:
            raise ValueError(
                f"the search is over the metric {searcher.metric!r}, and the history has {', '.join(names) or 'none'}: "
                "name one of them in searcher.metric"
            )
        values = [float(value) for value in history.get_metric_values(searcher.metric)]
        numbers = [value for value in values if value == value]  # min() and max() depend on the place of a NaN
        if not best or not numbers:
            return values[-1]
        if searcher.smaller_is_better:
            return min(numbers)
        return max(numbers)

    def _report_progress(self, trainer: TrainerBase, *, now: bool) -> None:
        clock = time.monotonic()
        if not self._chief or (clock - self._progress_at < 1.0 and not now):
            return
        self._progress_at = clock
        run = trainer._det_core.run
        if self._operation is not None:
            size = self._size(trainer)
            if size is None:
                self._operation.report_progress(run.epoch)
            else:
                self._operation.report_progress(steps_of(trainer) * size)
        elif not self.context.managed:
            epochs: float = run.epoch
            if run.length:
                epochs += run.batch / run.length
            self.context.train.report_progress(min(1.0, epochs / max(trainer.run_config.num_epochs, 1)))

    # Reports.

    def start_epoch(self, trainer: TrainerBase) -> None:
        """Start the clock of an epoch's speed."""
        self._epoch_clock = (time.monotonic(), trainer._loss_tracker.running_count)

    def report_epoch(self, trainer: TrainerBase) -> None:
        """Report the training metrics of an epoch."""
        self._report_window(trainer)
        if not self._chief:
            return
        history = trainer.run_history
        began, before = self._epoch_clock
        updated = recorded_since(history, self._counts)
        self._counts = counts_of(history)
        metrics = {name: value for name, value in updated.items() if "train" in name}
        samples = (trainer._loss_tracker.running_count - before) * trainer._det_core.strategy.num_processes
        metrics |= {"epoch": history.current_epoch, **learning_rates(trainer)}
        if (seconds := time.monotonic() - began) > 0 and samples:
            metrics["samples_per_second"] = samples / seconds
        self._report("training", steps_of(trainer), metrics)

    def _report_window(self, trainer: TrainerBase) -> None:
        """Report the mean loss of all ranks since the last report in this epoch, if due."""
        run = trainer._det_core.run
        tracker = trainer._loss_tracker
        total = tracker.total_loss
        count = tracker.running_count
        if not run.report_every or run.updates % run.report_every or run.reported == run.updates:
            return
        sums = trainer._det_core.strategy.sums([total - run.window[0], count - run.window[1]])
        run.window = (total, count)
        run.reported = run.updates
        if self._chief:  # the sums stay tensors, so that the step does not wait for a device
            self._report("training", steps_of(trainer), {"train_loss": sums[0] / sums[1], **learning_rates(trainer)})

    def report_evaluation(self, trainer: TrainerBase, before: Mapping[str, int], group: str) -> None:
        """Report the metrics that an evaluation has recorded.

        Args:
            trainer: the trainer.
            before: number of values of each metric before it.
            group: ``validation`` or ``evaluation``.
        """
        if not self._chief:
            return
        if self._is_skipping:
            trainer.print("Not reported, as this evaluation is of a training that had ended before")
            return
        repeated = self._report(group, steps_of(trainer), recorded_since(trainer.run_history, before))
        if repeated and group == "evaluation":
            trainer.print(
                f"Not reported, as there is a report of an evaluation at step {steps_of(trainer)} already: "
                + ", ".join(repeated)
            )

    def _report(self, group: str, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Report metrics; return the names already reported at this step."""
        at, names = self._reported.get(group, (-1, set[str]()))
        if at != step:
            names = set()
        # a second value at a step would be an error of the core
        new = {name: value for name, value in metrics.items() if name not in names}
        self._reported[group] = (step, names | set(new))
        if not new:
            return list(metrics)
        self.context.train.report_metrics(group, step, new)
        return [name for name in metrics if name not in new]


_BRIDGES: weakref.WeakKeyDictionary[core.Context, CoreBridge] = weakref.WeakKeyDictionary()
"""Bridge of each context, as the runs of all Trainers of a script are counted together."""


def counts_of(history: RunHistory) -> dict[str, int]:
    """Return the number of values of each metric."""
    return {name: len(history.get_metric_values(name)) for name in history.get_metric_names()}


def recorded_since(history: RunHistory, before: Mapping[str, int]) -> dict[str, Any]:
    """Return the latest values of metrics that have more values than ``before``."""
    more = [name for name, count in counts_of(history).items() if count > before.get(name, 0)]
    return {name: history.get_latest_metric(name) for name in more}


def _is_nan(stopped: Exception | None) -> bool:
    return stopped is not None and str(stopped).startswith(NAN_LOSS)


def learning_rates(trainer: TrainerBase) -> dict[str, float]:
    """Return the learning rate of each parameter group."""
    groups = [group for optimizer in with_param_groups(trainer.optimizer) for group in optimizer.param_groups]
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate_{i}": rate for i, rate in enumerate(rates)}
