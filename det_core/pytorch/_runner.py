"""Run one ``fit()`` of a trial: carry out the actions of the loop, one method for each."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from det_core import _clock, core
from det_core._training.data_order import Position
from det_core._training.loader_errors import is_caused_by_stop
from det_core._training.progress_line import ProgressLine, numbers_of
from det_core.errors import InvalidExperimentException, InvalidHP, TensorboardError
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import CheckpointContent, warn_hparam_changes
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
TENSORBOARD_SYNC_INTERVAL = 10.0
"""Seconds between two copies of TensorBoard's files: each waits for the disk, and sends whole files to the store."""


@dataclass(frozen=True)
class FitOptions:
    """Arguments of a ``fit()``.

    Attributes:
        latest_checkpoint: ID of the checkpoint given by the script, or None.
        resumes: whether the script gave no checkpoint, so that the run's latest one counts; it may be of another fit.
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
        """Return a text for each argument, equal for equal arguments, to compare among ranks."""
        texts = {f"fit({field.name}=)": repr(getattr(self, field.name)) for field in fields(self)}
        # A repr may have an address, which differs between ranks.
        return {name: re.sub(r" at 0x\w+", "", text) for name, text in texts.items()}


class Runner:
    """One fit of one trial on one rank.

    All ranks carry out the same actions, since every result that the loop receives is equal on every rank: ``core``
    agrees on stops, and the chief broadcasts the decision about a checkpoint and the length of an operation. Only
    :meth:`_train` and :meth:`_ask_stop` call ``should_preempt()``.
    """

    def __init__(
        self, trial: Trial, steps: TrialSteps, context: TrialContext, hooks: Hooks, options: FitOptions
    ) -> None:
        self._steps = steps
        self._context = context
        self._hooks = hooks
        self._options = options
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
        self._line: ProgressLine | None = None
        if self._chief:
            self._line = ProgressLine()
        self._stop_forwarded = False
        self._saving = False
        self._epoch_ended = False
        self._reported = True
        """True if all trained batches are in a report."""
        self._tensorboard_sync_at = 0.0
        self._numbers: dict[str, Any] = {}
        """Metrics since the last printed line of an epoch."""
        self._validation = Validation(
            trial, steps, context, hooks, policy=options.checkpoint_policy, test_mode=options.test_mode
        )
        self._carry_out: dict[type, Callable[[Any], bool | None]] = {
            Train: self._train, Report: self._report, Progress: self._progress, Validate: self._validate,
            Checkpoint: self._checkpoint, AskStop: self._ask_stop,
        }  # fmt: skip

    def run(self) -> None:
        """Prepare, restore, carry out every operation, and shut down.

        Raises:
            InvalidHP: If the trial raises it; a checkpoint is saved before.
            PeerLost: If another rank has left; with the text of that rank's error.
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
            self._save_on_chief_only()
            raise
        except RuntimeError as e:
            if self._distributed.size > 1 and is_broken_collective(e):  # torch only knows of a closed connection
                self._distributed.raise_if_peer_failed()
            raise
        finally:
            self._context._batches_before = self._counters.step
            self._batches = None
            self._print_epoch(end=True)
            if self._line is not None:
                self._line.close()
            if self._context._torch_profiler is not None:
                self._context._torch_profiler.stop()
            hooks.shut_down()  # last, so that its errors leave everything above closed
            self._context._stop_requested = False  # the request was for this fit

    # Before the first batch.

    def _prepare(self) -> bool:
        """Read the checkpoint, build loaders, and restore.

        Returns:
            whether to train: False if the checkpoint is of a later fit of the script.
        """
        with ExitStack() as stack:
            path = self._open_checkpoint(stack)
            content = None
            if path is not None:
                content = self._steps.read(path, str(self._latest))
            if content is not None and self._belongs_to_later_fit(content):
                return False
            self._hooks.start_up(self._start_step(), self._latest)
            self._restore(content)
        return True

    def _open_checkpoint(self, stack: ExitStack) -> Path | None:
        """Return the directory of the checkpoint to start from, or None to start from scratch."""
        checkpoint = self._core.checkpoint
        if self._options.resumes and self._context._resumed:
            return None
        # Scripts may give the checkpoint that the master selected: fit(latest_checkpoint=info.latest_checkpoint).
        if self._options.resumes or checkpoint.is_start(self._latest):
            path = stack.enter_context(checkpoint.resume(reject_unlisted=True))
            self._latest = self._core.latest_checkpoint
            return path
        if self._latest is None:
            return None
        return stack.enter_context(checkpoint.restore_path(self._latest, reject_unlisted=True))

    def _start_step(self) -> int:
        if self._latest is None:
            return 0
        if self._latest == self._core.latest_checkpoint:
            return self._core.steps_completed
        return int(self._core.checkpoint.get_metadata(self._latest).get("steps_completed", 0))

    def _belongs_to_later_fit(self, content: CheckpointContent) -> bool:
        """Return whether the checkpoint is of a later fit of the script; if so, load this fit's models from it."""
        own = self._counters
        saved = content.counters
        ended = self._options.resumes and saved.trial_id == own.trial_id and saved.fit > own.fit
        if ended:
            models = "with the models as they are"
            if self._steps.load_models_only(content):
                models = "whose models are loaded"
            logger.warning("skipping fit() %d, which is complete: resuming fit() %d, %s", own.fit, saved.fit, models)
        self._context._resumed = not ended
        return ended

    def _restore(self, content: CheckpointContent | None) -> None:
        context = self._context
        hooks = self._hooks
        seed = self._seed()
        self._position = Position(seed, 0, 0, 0, None, self._distributed.size)
        loader_state = None
        if content is not None and content.counters.trial_id == self._counters.trial_id:
            own = self._counters
            saved = content.counters
            if not self._options.resumes:  # the script gave it: steps continue from here
                saved = replace(saved, fit=own.fit, batches_before=own.batches_before)
            self._counters = saved
            self._position = content.position or replace(self._position, batches=self._counters.batches_trained)
            loader_state = content.loader
            if self._chief:
                warn_hparam_changes(content, context._hparams)
        self._batches, length = self._steps.loaders(self._position, loader_state)
        length = self._distributed.broadcast(length)
        if length == 0:
            raise RuntimeError("the training loader has no batch: its dataset is empty, or smaller than a batch")
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
            context._prepare_new_training()
        hooks.call("on_training_start")
        if options.profiling_enabled:
            self._core.profiler.on()
        if content is not None and content.random is not None:
            core.set_random_state(content.random)  # last: all the code above may draw random numbers

    def _seed(self) -> int:
        """Return the seed of the data order: the trial's, otherwise torch's on the chief."""
        if self._core.trial is not None:
            return self._core.trial.trial_seed
        # initial_seed() draws no random number.
        return int(self._distributed.broadcast(torch.initial_seed()))

    # Operations.

    def _operations(self) -> None:
        if self._options.step_zero_validation and not self._counters.batches_trained and not self._last_validation():
            self._validate(Validate(completes=False))
        operations: Iterable[core.SearcherOperation | None] = (None,)  # of a bare run
        if self._core.managed:
            operations = self._core.searcher.operations()
        for op in operations:
            self._operation = op
            if op is None:
                length = self._in_batches(self._options.max_length)
            else:
                length = self._length_of(op)
            if self._run_operation(length) is Outcome.STOPPED:
                self._context._preempted = self._core.preempt.is_preemption
                return

    def _last_validation(self) -> int | None:
        step: int | None = None
        if self._chief:
            step = self._core.last_validation
        step = self._distributed.broadcast(step)
        return step

    def _run_operation(self, length: int | None) -> Outcome:
        """Carry out the actions of one operation."""
        if self._options.test_mode:  # one batch, also of a resumed run
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
        """Return whether an error is that of a loader during a stop, such as a worker killed by the signal.

        With several ranks, the reopened loader has failed again. The others may be within a batch, so that the ranks
        cannot stop together: the chief saves, and the error ends the job.
        """
        if error is not self._steps.loader_error or not is_caused_by_stop(error, self._core.preempt):
            return False
        if self._distributed.size > 1:
            self._save_on_chief_only()
            return False
        return self._core.preempt.should_preempt()

    def _leave_early(self) -> Outcome:
        """Report and save the trained batches; a validation that is due comes after the resume."""
        logger.warning("the loader failed during a stop: %s", self._steps.loader_error)
        if len(self._steps.buffer):
            self._report(Report())
        if not self._counters.saved:
            self._checkpoint(Checkpoint())
        return Outcome.STOPPED

    def _units_per_batch(self) -> int | None:
        """Return the number of searcher units in a batch, or None if the unit is epochs."""
        units: dict[type, core.Unit] = {Batch: core.Unit.BATCHES, Epoch: core.Unit.EPOCHS}
        default_unit = units.get(type(self._options.max_length))  # of a configured length without a unit
        searcher = self._core.searcher
        batch_size = None
        if searcher.get_configured_units() is core.Unit.RECORDS:
            batch_size = self._context.get_global_batch_size()
        return searcher.units_per_batch(batch_size, default_unit)

    def _length_of(self, op: core.SearcherOperation) -> int:
        """Return the length of an operation in batches."""
        units = self._units_per_batch()
        if units is None:
            return self._in_batches(Epoch(op.length)) or 0
        return max(op.length // units, 1)

    def _in_batches(self, unit: TrainUnit | None) -> int | None:
        if unit is None:
            return None
        assert isinstance(unit.value, int)
        if isinstance(unit, Batch):
            return unit.value
        if self._schedule.epoch_len is None:
            raise InvalidExperimentException(
                "a length in epochs requires a training loader with a length: use batches, as Batch(N)"
            )
        return unit.value * self._schedule.epoch_len

    # Actions.

    def _train(self, action: Train) -> bool:
        """Train until a boundary; return whether all ranks stop."""
        context = self._context
        counters = self._counters
        hooks = self._hooks
        train_one = self._steps.train
        should_preempt = self._core.preempt.should_preempt
        batches = self._batches
        epoch_len = context._epoch_len
        profiler = context._torch_profiler
        line = self._line
        if self._chief:
            self._core.train.set_status("training")
        for model in context.models:
            model.train()  # validation has put it into evaluation mode
        if self._reported:  # otherwise the workload continues: the boundary was beyond LOOKAHEAD
            context._reducers.reset()
            self._reported = False
        if profiler is not None:
            profiler.start()
        while (n := counters.batches_trained) < action.until:
            epoch = 0
            in_epoch = n
            if epoch_len:
                epoch, in_epoch = divmod(n, epoch_len)
            if in_epoch == 0:
                self._print_epoch()
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
            if line is not None and line.shown:  # costs nothing without a terminal
                line.update(n + 1, self._length)
            if context._stop_requested and not self._stop_forwarded:
                self._request_stop()
            if should_preempt():
                return True
        return False

    def _report(self, _action: Report) -> None:
        """Report the workload that just ended: averages over ranks and batches, and results of reducers."""
        context = self._context
        counters = self._counters
        rows = self._steps.buffer.take()
        reducers = context._reducers
        self._reported = True
        rows_per_batch = self._steps.rows_per_batch
        check_names(rows, "train_batch", counters.batches_trained - len(rows) // rows_per_batch, rows_per_batch)
        slots = reducers.slots(training=True)
        gathered: list[Any] | None = [(rows, slots)]
        if self._distributed.size > 1:
            if "on_training_workload_end" in self._hooks.anywhere or reducers.any(training=True):
                gathered = self._distributed.allgather((rows, slots))
            else:  # only the chief needs them
                gathered = self._distributed.gather((rows, slots))
        if gathered is None:
            return
        averages, per_batch = training_results([each[0] for each in gathered])
        reduced = reducers.reduce([each[1] for each in gathered], training=True)
        metrics = {**averages, **reduced}
        if self._chief:
            step = self._step
            row = {"batches": step, "epochs": counters.epochs_trained, **metrics}
            self._core.train.report_training_metrics(step, row, batch_metrics=per_batch)
            if context._tensorboard:
                self._write_scalars(step, per_batch, reduced)
            if self._line is not None:
                named = {f"training {name}": value for name, value in metrics.items()}
                self._line.update(step, self._length, named)
                self._numbers |= named
        self._hooks.call("on_training_workload_end", avg_metrics=metrics, batch_metrics=per_batch)

    def _print_epoch(self, *, end: bool = False) -> None:
        """Print a line for an epoch that is reported and validated, or for the end, without a progress line."""
        line = self._line
        counters = self._counters
        if line is not None and ((end and self._numbers) or (self._epoch_ended and not line.shown)):
            done = "end"
            if self._epoch_ended:
                done = f"epoch {counters.epochs_trained}"
            batches = str(counters.batches_trained)
            if self._length:
                batches += f"/{self._length}"
            line.say(f"{done}: {batches} batches  {numbers_of(self._numbers)}".rstrip())
        if self._epoch_ended:
            self._numbers = {}
        self._epoch_ended = False

    def _write_scalars(self, step: int, per_batch: list[dict[str, Any]], reduced: Mapping[str, Any]) -> None:
        write = self._core.train.write_scalars
        rows_per_batch = self._steps.rows_per_batch
        first = step - len(per_batch) // rows_per_batch
        for i, row in enumerate(per_batch):
            write(first + i // rows_per_batch, {f"Determined/{name}": value for name, value in row.items()})
        if reduced:
            write(step, {f"Determined/{name}": value for name, value in reduced.items()})

    def _progress(self, _action: Progress) -> None:
        """Report progress in the searcher's unit, or as a fraction in a bare run."""
        if not self._chief:
            return
        counters = self._counters
        op = self._operation
        if op is None:
            if self._length:
                self._core.train.report_progress(min(1.0, counters.batches_trained / self._length))
            return
        units = self._units_per_batch()
        if units is None:
            op.report_progress(counters.epochs_trained)
        else:
            op.report_progress(counters.batches_trained * units)

    def _validate(self, action: Validate) -> bool:
        """Validate, and complete the operation if asked to; return whether the policy asks for a checkpoint."""
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
        before = counters.last_ckpt
        counters.last_ckpt = counters.batches_trained
        self._saving = True
        try:
            storage_id = self._steps.save(self._content())
        except BaseException:
            counters.last_ckpt = before
            raise
        self._saving = False
        self._hooks.call("on_checkpoint_upload_end", uuid=storage_id)

    def _content(self) -> CheckpointContent:
        counters = replace(self._counters)  # a copy, as a background save outlives this call
        return CheckpointContent(
            counters, self._steps.position(self._position, counters.batches_trained), step=self._step
        )

    @property
    def _step(self) -> int:
        return self._counters.step

    def _ask_stop(self, _action: AskStop) -> bool:
        """Copy TensorBoard's files from time to time, and check for a stop."""
        if _clock.monotonic() >= self._tensorboard_sync_at:
            self._sync_tensorboard()
            self._tensorboard_sync_at = _clock.monotonic() + TENSORBOARD_SYNC_INTERVAL
        if self._context._stop_requested and not self._stop_forwarded:
            self._request_stop()
        return self._core.preempt.should_preempt()

    def _sync_tensorboard(self) -> None:
        if not (self._chief and self._context._tensorboard):
            return
        try:
            if self._context._writer is not None:
                self._context._writer.flush()
            self._core.train.sync_tensorboard()
        except TensorboardError as e:  # training goes on: the journal has the same values
            logger.warning("cannot copy TensorBoard's files: %s", e)

    def _request_stop(self) -> None:
        self._stop_forwarded = True
        self._core.preempt.request("stop requested")

    def _save_on_chief_only(self) -> None:
        """Save before an error leaves, without collectives, as the other ranks may be anywhere."""
        counters = self._counters
        # An error raised by a hook of a save would be raised by this save too.
        if self._steps.saves_alone and self._chief and not self._saving and not counters.saved:
            counters.last_ckpt = counters.batches_trained
            storage_id = self._steps.save(self._content(), alone=True)
            if self._distributed.size == 1:
                self._hooks.call("on_checkpoint_upload_end", uuid=storage_id)


def is_broken_collective(error: Exception) -> bool:
    """Return whether an error of torch means that another rank is gone."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
