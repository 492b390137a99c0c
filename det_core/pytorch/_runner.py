"""Carries out what the loop says: one method an action, around one trial, for one ``fit()``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from det_core import _clock, core
from det_core._training.data_order import Position
from det_core._training.loader_errors import comes_with_stop
from det_core._training.progress_line import ProgressLine, numbers_of
from det_core.errors import InvalidExperimentException, InvalidHP, TensorboardError
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import Content, tell_changes
from det_core.pytorch._loop import (
    AskStop,
    Batch,
    Checkpoint,
    Counters,
    Epoch,
    Outcome,
    Progress,
    Report,
    Schedule,
    Train,
    TrainUnit,
    Validate,
    operation,
)
from det_core.pytorch._reducer import check_names, training_results
from det_core.pytorch._steps import TrialSteps
from det_core.pytorch._trial import Trial
from det_core.pytorch._trial_context import TrialContext
from det_core.pytorch._validation import Validation

logger = logging.getLogger("det_core.pytorch")
PREEMPTIONS = ("signal", "master")
"""The reasons of a stop after which the job goes on later."""
SHIP_EVERY = 10.0
"""Seconds between two copies of TensorBoard's files at boundaries: each waits for the disk, and a store gets the whole
file anew."""


@dataclass(frozen=True)
class FitOptions:
    """The arguments of a ``fit()``.

    Attributes:
        latest_checkpoint: the checkpoint that was named; None: none.
        resumes: whether none was named, so that it is that of the run that is resumed, which may be of another fit.
    """

    checkpoint_period: TrainUnit | None
    validation_period: TrainUnit | None
    max_length: TrainUnit | None
    reporting_period: TrainUnit | None
    checkpoint_policy: str
    latest_checkpoint: str | None
    step_zero_validation: bool
    test_mode: bool
    profiling_enabled: bool
    resumes: bool = False

    def by_name(self) -> dict[str, Any]:
        """What ranks compare: equal texts for equal arguments."""
        told = {f"fit({field.name}=)": repr(getattr(self, field.name)) for field in fields(self)}
        return {name: re.sub(r" at 0x\w+", "", text) for name, text in told.items()}


class Runner:
    """One fit of one trial on one rank.

    All ranks are told the same next action, since every answer that the loop gets is equal on every rank: a stop is
    agreed on by the core, the policy's verdict and an operation's length are the chief's, broadcast. So there is no
    other agreement in here; only :meth:`_train` and :meth:`_ask_stop` call ``should_preempt()``.
    """

    def __init__(
        self, trial: Trial, steps: TrialSteps, context: TrialContext, hooks: Hooks, options: FitOptions
    ) -> None:
        self._steps, self._context, self._hooks, self._options = steps, context, hooks, options
        self._core = context._core
        self._distributed = context.distributed
        self._chief = self._distributed.rank == 0
        self._latest = options.latest_checkpoint
        self._counters = Counters(
            trial_id=context.get_trial_id(), fit=context._fits, batches_before=context._batches_before
        )
        self._position: Position
        self._batches: Iterator[Any] | None = None
        self._schedule: Schedule
        self._operation: core.SearcherOperation | None = None
        self._length: int | None = None
        self._line = ProgressLine() if self._chief else None
        self._stop_told = self._saving = self._epoch_ended = False
        self._reported = True
        """Whether all that was trained is in a report."""
        self._ship_at = 0.0
        self._numbers: dict[str, Any] = {}
        """The metrics since the last line of an epoch, by what they are of."""
        self._validation = Validation(
            trial, steps, context, hooks, policy=options.checkpoint_policy, test_mode=options.test_mode
        )
        self._carry_out: dict[type, Callable[[Any], bool | None]] = {
            Train: self._train, Report: self._report, Progress: self._progress, Validate: self._validate,
            Checkpoint: self._checkpoint, AskStop: self._ask_stop,
        }  # fmt: skip

    def run(self) -> None:
        """Prepare, restore, carry out every operation, shut down.

        Raises:
            InvalidHP: out of the trial, after a checkpoint.
            PeerLost: another rank has left; with its error's text, also where torch only says that a connection was
                closed.
        """
        hooks = self._hooks
        try:
            signature = self._context._reducers.signature()
            self._context._check_alike({**self._options.by_name(), "wrapped reducers": signature})
            hooks.agree(self._distributed)
            if self._prepare():
                self._operations()
                self._sync_tensorboard()
        except InvalidHP:
            self._save_alone()
            raise
        except RuntimeError as e:
            if self._distributed.size > 1 and is_broken_collective(e):
                self._distributed.raise_if_peer_failed()
            raise
        finally:
            self._context._batches_before = self._counters.step
            self._batches = None
            self._tell(end=True)
            if self._line is not None:
                self._line.close()
            if self._context._torch_profiler is not None:
                self._context._torch_profiler.stop()
            hooks.shut_down()
            self._context._stop_requested = False  # it was about this fit

    # before the first batch

    def _prepare(self) -> bool:
        """Read, build loaders, restore, and put the random states back last: what comes before may draw from them.

        Returns:
            False: this fit had ended before, and the checkpoint is of a later one of the script.
        """
        with ExitStack() as stack:
            path = self._opened(stack)
            content = None if path is None else self._steps.read(path, str(self._latest))
            if content is not None and self._had_ended(content):
                return False
            self._hooks.start_up(self._start_step(), self._latest)
            self._restore(content)
        return True

    def _opened(self, stack: ExitStack) -> Path | None:
        """Return the folder of the checkpoint to start from; None: from scratch."""
        checkpoint = self._core.checkpoint
        if self._options.resumes and self._context._resumed:
            return None
        # Scripts name what the master handed over: fit(latest_checkpoint=info.latest_checkpoint).
        if self._options.resumes or checkpoint.is_start(self._latest):
            path = stack.enter_context(checkpoint.resume(only_listed=True))
            self._latest = self._core.latest_checkpoint
            return path
        if self._latest is None:
            return None
        return stack.enter_context(checkpoint.restore_path(self._latest, only_listed=True))

    def _start_step(self) -> int:
        if self._latest is None or self._latest == self._core.latest_checkpoint:
            return self._core.steps_completed if self._latest is not None else 0
        return int(self._core.checkpoint.get_metadata(self._latest).get("steps_completed", 0))

    def _had_ended(self, content: Content) -> bool:
        """Whether the checkpoint is of a later fit of the script; what it has of this one's models is taken then."""
        own, saved = self._counters, content.counters
        ended = self._options.resumes and saved.trial_id == own.trial_id and saved.fit > own.fit
        if ended:
            logger.warning(
                "fit() %d of this script had ended before: it goes on with number %d, %s", own.fit, saved.fit,
                "whose models these are now" if self._steps.take_models(content) else "with the models as they are",
            )  # fmt: skip
        self._context._resumed = not ended
        return ended

    def _restore(self, content: Content | None) -> None:
        context, hooks = self._context, self._hooks
        seed = self._seed()
        self._position = Position(seed, 0, 0, 0, None, self._distributed.size)
        loader_state = None
        if content is not None and content.counters.trial_id == self._counters.trial_id:
            own, saved = self._counters, content.counters
            if not self._options.resumes:  # it was named: rows and checkpoints count on from here
                saved = replace(saved, fit=own.fit, batches_before=own.batches_before)
            self._counters = saved
            self._position = content.position or replace(self._position, batches=self._counters.batches_trained)
            loader_state = content.loader
            if self._chief:
                tell_changes(content, context._hparams)
        self._batches, length = self._steps.loaders(self._position, loader_state)
        length = self._distributed.broadcast(length)
        if length == 0:
            raise RuntimeError("the training loader gives no batch: its dataset is empty, or smaller than a batch")
        context._epoch_len = length
        options = self._options
        self._schedule = Schedule(
            length, options.validation_period, options.checkpoint_period, options.reporting_period
        )
        if content is not None:
            self._steps.apply(content)
            if self._last_validation() == self._counters.step:
                self._counters.last_val = self._counters.batches_trained
        else:
            context._begin_alike()
        hooks.call("on_training_start")
        if options.profiling_enabled:
            self._core.profiler.on()
        if content is not None and content.random is not None:
            core.set_random_state(content.random)

    def _seed(self) -> int:
        """What the order of the data comes from: the trial's, else torch's own on the chief, which draws nothing."""
        if self._core.trial is not None:
            return self._core.trial.trial_seed
        return int(self._distributed.broadcast(torch.initial_seed()))

    # operations

    def _operations(self) -> None:
        if self._options.step_zero_validation and not self._counters.batches_trained and not self._last_validation():
            self._validate(Validate(completes=False))
        for op in self._core.searcher.operations() if self._core.managed else (None,):
            self._operation = op
            length = self._in_batches(self._options.max_length) if op is None else self._length_of(op)
            if self._drive(length) is Outcome.STOPPED:
                self._context._preempted = self._core.preempt.reason in PREEMPTIONS
                return

    def _last_validation(self) -> int | None:
        step: int | None = self._distributed.broadcast(self._core.last_validation if self._chief else None)
        return step

    def _drive(self, length: int | None) -> Outcome:
        """Carry out one operation's actions."""
        if self._options.test_mode:
            length = self._counters.batches_trained + 1
        self._length = length
        actions = operation(self._counters, self._schedule, length, handed_out=self._operation is not None)
        answer: bool | None = None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            try:
                answer = bool(self._carry_out[type(action)](action))
            except Exception as e:
                if not self._is_stop(e):
                    raise
                return self._leave_early()

    def _is_stop(self, error: Exception) -> bool:
        """Return whether an error is a loader's, of a worker that died of the signal to stop, say.

        With several ranks the loader was opened again, and has failed again. The others may be in the middle of a
        batch, so they cannot stop together: the chief saves, and the error ends the job.
        """
        if error is not self._steps.loader_error or not comes_with_stop(error, self._core.preempt):
            return False
        if self._distributed.size > 1:
            self._save_alone()
            return False
        return self._core.preempt.should_preempt()

    def _leave_early(self) -> Outcome:
        """Report and save what is trained; a validation that was due comes first after the resume."""
        logger.warning("the loader failed after a signal to stop: %s", self._steps.loader_error)
        if len(self._steps.buffer):
            self._report(Report())
        if not self._counters.saved:
            self._checkpoint(Checkpoint())
        return Outcome.STOPPED

    def _units_per_batch(self) -> int | None:
        """What a batch counts in the searcher's lengths; None: they are epochs. ``max_length`` gives a plain number its
        unit."""
        units: dict[type, core.Unit] = {Batch: core.Unit.BATCHES, Epoch: core.Unit.EPOCHS}
        given = units.get(type(self._options.max_length))
        searcher, records = self._core.searcher, core.Unit.RECORDS
        size = self._context.get_global_batch_size() if searcher.get_configured_units() is records else None
        return searcher.units_per_batch(size, given)

    def _length_of(self, op: core.SearcherOperation) -> int:
        """An operation's length in batches."""
        units = self._units_per_batch()
        return (self._in_batches(Epoch(op.length)) or 0) if units is None else max(op.length // units, 1)

    def _in_batches(self, unit: TrainUnit | None) -> int | None:
        if unit is None:
            return None
        assert isinstance(unit.value, int)
        if isinstance(unit, Batch):
            return unit.value
        if self._schedule.epoch_len is None:
            raise InvalidExperimentException(
                "a length in epochs needs a training loader with a length: give it in batches, as Batch(N)"
            )
        return unit.value * self._schedule.epoch_len

    # the actions

    def _train(self, action: Train) -> bool:
        """Train until a boundary; whether a stop was agreed on."""
        context, counters, hooks, train_one = self._context, self._counters, self._hooks, self._steps.train
        should_preempt, batches, epoch_len = self._core.preempt.should_preempt, self._batches, context._epoch_len
        profiler, line = context._torch_profiler, self._line
        if self._chief:
            self._core.train.set_status("training")
        for model in context.models:
            model.train()
        if self._reported:  # else this goes on with a workload, of which the loop had to look further ahead
            context._reducers.reset()
            self._reported = False
        if profiler is not None:
            profiler.start()
        while (n := counters.batches_trained) < action.until:
            epoch, in_epoch = divmod(n, epoch_len) if epoch_len else (0, n)
            if in_epoch == 0:
                self._tell()
                for hook in hooks.on_training_epoch_start:
                    hook(epoch)
            train_one(batches, epoch, n)
            counters.batches_trained = n + 1
            if in_epoch + 1 == epoch_len:
                for hook in hooks.on_training_epoch_end:
                    hook(epoch)
                counters.epochs_trained += 1
                self._epoch_ended = True
            if profiler is not None:
                profiler.step()
            if line is not None and line.shown:
                line.update(n + 1, self._length)
            if context._stop_requested and not self._stop_told:
                self._request_stop()
            if should_preempt():
                return True
        return False

    def _report(self, _action: Report) -> None:
        """Report the workload that has just ended: averages over ranks and batches, and the reducers' results."""
        context, counters = self._context, self._counters
        rows, reducers = self._steps.buffer.take(), context._reducers
        self._reported = True
        each = self._steps.rows_per_batch
        check_names(rows, "train_batch", counters.batches_trained - len(rows) // each, each)
        slots = reducers.slots(training=True)
        everywhere = "on_training_workload_end" in self._hooks.anywhere or reducers.any(training=True)
        exchange = self._distributed.allgather if everywhere else self._distributed.gather
        gathered = exchange((rows, slots)) if self._distributed.size > 1 else [(rows, slots)]
        if gathered is None:
            return
        averages, per_batch = training_results([each[0] for each in gathered])
        reduced = reducers.reduce([each[1] for each in gathered], training=True)
        metrics = {**averages, **reduced}
        if self._chief:
            step = self._step
            told = {"batches": step, "epochs": counters.epochs_trained, **metrics}
            self._core.train.report_training_metrics(step, told, batch_metrics=per_batch)
            if context._tensorboard:
                self._write_scalars(step, per_batch, reduced)
            if self._line is not None:
                named = {f"training {name}": value for name, value in metrics.items()}
                self._line.update(step, self._length, named)
                self._numbers |= named
        self._hooks.call("on_training_workload_end", avg_metrics=metrics, batch_metrics=per_batch)

    def _tell(self, *, end: bool = False) -> None:
        """Say that an epoch is over, once it is reported and validated, where no line shows it; say it of the end."""
        line, counters = self._line, self._counters
        if line is not None and ((end and self._numbers) or (self._epoch_ended and not line.shown)):
            done = f"epoch {counters.epochs_trained}" if self._epoch_ended else "end"
            so_far = f"{counters.batches_trained}/{self._length}" if self._length else counters.batches_trained
            line.say(f"{done}: {so_far} batches  {numbers_of(self._numbers)}".rstrip())
        if self._epoch_ended:
            self._numbers = {}
        self._epoch_ended = False

    def _write_scalars(self, step: int, per_batch: list[dict[str, Any]], reduced: Mapping[str, Any]) -> None:
        write, each = self._core.train.write_scalars, self._steps.rows_per_batch
        first = step - len(per_batch) // each
        names = {name: f"Determined/{name}" for name in (per_batch[0] if per_batch else ())}
        for i, row in enumerate(per_batch):
            write(first + i // each, {names.get(name, name): value for name, value in row.items()})
        if reduced:
            write(step, {f"Determined/{name}": value for name, value in reduced.items()})

    def _progress(self, _action: Progress) -> None:
        """Say how far the operation is, in the searcher's unit; in a bare run as a fraction."""
        if not self._chief:
            return
        counters, op = self._counters, self._operation
        if op is None:
            if self._length:
                self._core.train.report_progress(min(1.0, counters.batches_trained / self._length))
            return
        units = self._units_per_batch()
        op.report_progress(counters.epochs_trained if units is None else counters.batches_trained * units)

    def _validate(self, action: Validate) -> bool:
        """Validate, and complete the operation if this validation does; whether the policy wants a checkpoint."""
        metrics, wanted = self._validation.run(self._counters, self._step)
        if self._line is not None:
            if self._line.shown:
                self._line.say(f"validation at batch {self._step}: {numbers_of(metrics)}")
            self._numbers |= {f"validation {name}": value for name, value in metrics.items()}
        if self._chief and self._operation is not None:
            value = self._core.searcher.metric_of(metrics)
            if action.completes and not self._operation.completed:
                self._operation.report_completed(value)
        return wanted

    def _checkpoint(self, _action: Checkpoint) -> None:
        counters = self._counters
        before, counters.last_ckpt = counters.last_ckpt, counters.batches_trained
        self._saving = True
        try:
            storage_id = self._steps.save(self._content())
        except BaseException:
            counters.last_ckpt = before
            raise
        self._saving = False
        self._hooks.call("on_checkpoint_upload_end", uuid=storage_id)

    def _content(self) -> Content:
        counters = replace(self._counters)
        return Content(counters, self._steps.position(self._position, counters.batches_trained), step=self._step)

    @property
    def _step(self) -> int:
        return self._counters.step

    def _ask_stop(self, _action: AskStop) -> bool:
        """Ship what is beside the record, and ask whether to stop."""
        if _clock.monotonic() >= self._ship_at:
            self._sync_tensorboard()
            self._ship_at = _clock.monotonic() + SHIP_EVERY
        if self._context._stop_requested and not self._stop_told:
            self._request_stop()
        return self._core.preempt.should_preempt()

    def _sync_tensorboard(self) -> None:
        if not (self._chief and self._context._tensorboard):
            return
        try:
            if self._context._writer is not None:
                self._context._writer.flush()
            self._core.train.sync_tensorboard()
        except TensorboardError as e:  # a copy; the record is whole
            logger.warning("TensorBoard's files were not copied: %s", e)

    def _request_stop(self) -> None:
        self._stop_told = True
        self._core.preempt.request("stop requested")

    def _save_alone(self) -> None:
        """Save before an InvalidHP leaves, on the chief, without a word to the others, who may be anywhere.

        One that came out of a save, from a hook, would come out of this one as well.
        """
        counters = self._counters
        if self._steps.saves_alone and self._chief and not self._saving and not counters.saved:
            counters.last_ckpt = counters.batches_trained
            storage_id = self._steps.save(self._content(), alone=True)
            if self._distributed.size == 1:
                self._hooks.call("on_checkpoint_upload_end", uuid=storage_id)


def is_broken_collective(error: Exception) -> bool:
    """Whether torch says that another rank is gone. All other errors are this rank's own, and stay what they are."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
