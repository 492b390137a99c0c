"""Loops of training and evaluation: epochs, batches, updates, and stops agreed on by all ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from det_core._training.data_order import length_of, share
from det_core._training.loader_errors import is_caused_by_stop
from det_core.accelerated._base import EVALUATED, TRAINED, Run, TrainerBase, as_list, by_name, callbacks_of
from det_core.accelerated._batches import check_batch_count, evaluation_batches, in_groups, training_batches
from det_core.accelerated._data import whole_length
from det_core.accelerated._events import NAN_LOSS, AgreedStop, StopTrainingError, event_caller
from det_core.accelerated._lifecycle import begin_run, compare_ranks, open_run, restore_parts
from det_core.accelerated._managed import counts_of
from det_core.accelerated.run_config import TrainerRunConfig

logger = logging.getLogger("det_core.accelerated")


class TrainingLoop(TrainerBase):
    """Loop over what a Trainer has prepared; methods called through ``self`` can be overridden."""

    # Training.

    def _run_training(self) -> None:
        """Train the epochs of ``self.run_config``, or those that remain after a resume."""
        session = self._det_core
        with open_run(self):  # train() has opened it; a user-defined method in its place has not
            run = session.run
            if not session.is_loaded:
                run = Run()
            if session.run.is_begun or begin_run(self, run, session.is_loaded or None):
                _train(self)

    def _run_train_epoch(self, train_dl: Any) -> bool:
        """Train an epoch, or the rest of a resumed one; return whether updates have reached the limit of the run."""
        session = self._det_core
        run = session.run
        handler = self.callback_handler
        whole = self._train_dataloader
        if run.is_leaving:
            return True
        if run.part:  # in a user-defined loop over epochs, which does not count them
            run.epoch += 1
            run.batch = 0
            run.part = 0
        if not run.batch:
            _restore_random(self)
        session.catching_stop(self.train_epoch_start)
        if not run.batch:
            self._loss_tracker.reset()
            run.norms = []
            run.window = (0.0, 0)
            for metric in by_name(session.train_metrics).values():
                metric.reset()
        handler.call_event("on_train_epoch_start", self)
        if train_dl is whole:
            train_dl = self._train_dataloader  # a callback may have replaced it
        _train_batches(self, train_dl)
        if run.is_leaving:
            return run.has_ended
        session.catching_stop(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        if run.norms:
            self.run_history.update_metric("train_gradient_norm", float(torch.stack(run.norms).mean()))
        _record_metrics(self, session.train_metrics, "train_")
        run.part = TRAINED
        handler.call_event("on_train_epoch_end", self)
        if session.managed is not None:
            session.managed.report_epoch(self)
        return run.has_ended

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Compute the loss of a batch and its gradients; the loop makes the update."""
        session = self._det_core
        config = self.run_config
        run = session.run
        if not run.in_epoch:  # in a user-defined epoch, which does not resolve them
            _resolve_events(self)
        if session.step_start is not None:
            session.step_start(self)
        output = self.calculate_train_batch_loss(batch)
        loss = output["loss"]
        session.batch_loss = None
        self._update_loss_tracker(loss, output["batch_size"])
        if session.train_metrics is not None:
            self.update_metrics(session.train_metrics, batch, output)
        if session.step_end is not None:
            session.step_end(self, batch=batch, batch_output=output, step=step)
        group = run.group or config.gradient_accumulation_steps
        if config.is_distributed and config.gradient_accumulation_steps > 1 and "num_items_in_batch" in output:
            loss = loss * config.num_processes  # a mean over the tokens of all ranks, and DDP averages once more
        if group > 1:
            loss = loss / group
        self.backward_step(loss)
        if not run.in_epoch and config.gradient_clip_value is not None:
            self._clip_gradients()

    # Evaluation.

    def _run_evaluation(self) -> None:
        """Evaluate once with the loader that ``evaluate()`` has prepared."""
        with open_run(self):
            handler = self.callback_handler
            session = self._det_core
            compare_ranks(self)
            if session.managed is not None:
                session.run.base = session.managed.steps - session.run.updates  # another Trainer may have trained
            try:
                self.evaluation_run_start()
                handler.call_event("on_evaluation_run_start", self)
                try:
                    self._run_eval_epoch(self._eval_dataloader, is_training=False)
                    _agree_on_stops(self)
                except StopTrainingError as e:
                    _stopped(self, e)
                self.evaluation_run_end()
                restore_parts(self)
                handler.call_event("on_evaluation_run_end", self)
            finally:
                handler.call_event("on_run_closed", self)

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate on all batches of a loader.

        Args:
            valid_dl: the loader.
            is_training: whether it is part of a training run.
            is_intermediate: whether training continues in the same epoch; metrics are then deleted from the history.
        """
        session = self._det_core
        handler = self.callback_handler
        history = self.run_history
        whole = self._eval_dataloader
        kind = "evaluation"
        if is_training:
            kind = "eval"
        if is_intermediate:
            kind = "intermediate_eval"
        before = counts_of(history)
        with _evaluation_state(self):
            session.catching_stop(self.eval_epoch_start)
            handler.call_event("on_eval_epoch_start", self, is_intermediate=is_intermediate)
            if valid_dl is whole:
                valid_dl = self._eval_dataloader
            with torch.no_grad(), session.strategy.evaluating(self.model):
                _eval_batches(self, valid_dl)
            session.catching_stop(self.eval_epoch_end)
            self._add_epoch_loss_to_run_history("eval_loss_epoch" if kind == "eval" else f"{kind}_loss")
            _record_metrics(self, session.metrics, f"{kind}_")
            handler.call_event("on_eval_epoch_end", self, is_intermediate=is_intermediate)
        if session.managed is not None:
            session.managed.report_evaluation(self, before, "validation" if is_training else "evaluation")
        if is_intermediate:
            prefix = f"{history.metric_name_prefix}intermediate_eval_"
            for name in [n for n in history.get_metric_names() if n.startswith(prefix)]:
                history.delete_metric(name)

    # Losses.

    def _update_loss_tracker(self, batch_loss: Any, batch_size: int) -> None:
        """Count the loss of a batch, or the mean of its losses."""
        is_on_cpu = batch_loss.is_cpu
        value = batch_loss
        if not is_on_cpu or value.numel() != 1:
            value = value.detach().mean()
        if is_on_cpu:  # read once for all users; on other devices item() would wait for the step
            value = value.item()
        self._det_core.batch_loss = value
        self._loss_tracker.update(value, batch_size)

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Record the mean loss over the samples of all ranks."""
        tracker = self._loss_tracker
        total, count = self._det_core.strategy.sums([tracker.total_loss, tracker.running_count]).tolist()
        mean = float("nan")
        if count:
            mean = total / count
        self.run_history.update_metric(metric_name, mean)


# Training.


def _train(trainer: TrainingLoop) -> None:
    session = trainer._det_core
    handler = trainer.callback_handler
    run = session.run
    managed = session.managed
    try:
        trainer.training_run_start()
        handler.call_event("on_training_run_start", trainer)
        if session.resumed is not None:  # callbacks have reset themselves
            session.resumed.restore_callbacks(callbacks_of(trainer))
        run.has_ended = _is_at_limit(trainer)
        try:
            _handle_stop_requests(trainer)  # also the first call in a process, which starts to catch signals
            if managed is not None and not session.preempted:
                managed.start(trainer)
            while not run.is_leaving and _has_more(trainer):
                try:
                    _run_epoch(trainer)
                except Exception as e:
                    if not _is_stop(trainer, e):
                        raise
                    _handle_stop_requests(trainer)
            if session.preempted:
                return
        except StopTrainingError as e:
            run.stopped = _stopped(trainer, e)
        _restore_random(trainer)  # if all epochs were trained before the resume
        if managed is not None:
            managed.end(trainer)
        trainer.training_run_end()
        restore_parts(trainer)
        handler.call_event("on_training_run_end", trainer)
    finally:
        handler.call_event("on_run_closed", trainer)
    if run.stopped is not None and str(run.stopped).startswith(NAN_LOSS):
        if session.on_nan == "raise":
            raise run.stopped
        if session.on_nan == "exit" and managed is None:
            raise SystemExit("Exiting due to NaN loss")


def _run_epoch(trainer: TrainingLoop) -> None:
    session = trainer._det_core
    run = session.run
    if run.part:
        _restore_random(trainer)
    elif trainer._run_train_epoch(trainer._train_dataloader):
        run.has_ended = True
    if run.is_leaving:
        return
    run.part = max(run.part, TRAINED)
    if trainer.eval_dataset is not None and run.part < EVALUATED:
        trainer._run_eval_epoch(trainer._eval_dataloader)
    run.part = EVALUATED
    session.catching_stop(trainer.training_run_epoch_end)
    trainer._det_core_epoch_done()
    trainer.callback_handler.call_event("on_training_run_epoch_end", trainer)
    _agree_on_stops(trainer)
    if run.has_ended and (limit := limit_of(trainer.run_config)) is not None:
        trainer.print(f"Reached max number of training steps {limit} in epoch {trainer.run_history.current_epoch}")
    trainer.run_history._increment_epoch()
    run.epoch += 1
    run.batch = 0
    run.part = 0
    if session.managed is not None:
        session.managed.after_epoch(trainer)


def _train_batches(trainer: TrainingLoop, train_dl: Any) -> None:
    """Train the batches of an epoch from ``run.batch`` on.

    Raises:
        RuntimeError: If the loader gives none, or fewer than its length.
    """
    session = trainer._det_core
    config = trainer.run_config
    run = session.run
    strategy = session.strategy
    has_peers = session.has_peers
    run.length = length_of(train_dl)
    run.accumulation = config.gradient_accumulation_steps
    batches = training_batches(session, train_dl)
    if run.length is None:
        batches = in_groups(session, batches)
    _resolve_events(trainer)
    if session.managed is not None:
        session.managed.start_epoch(trainer)
    _restore_random(trainer)  # last, as opening the loader may draw random numbers
    perform = trainer._perform_forward_and_backward_passes
    accumulation = run.accumulation
    step = run.batch
    clips = config.gradient_clip_value is not None or run.clip_norm is not None
    run.in_epoch = run.in_step = True
    run.group = accumulation
    rest = (run.length or 0) % accumulation
    short_from = (run.length or 0) - rest if rest else None
    try:
        if run.has_ended:
            return
        for batch in batches:
            if step == run.length:  # a user-defined loader may start from 0 after a resume
                break
            if step == short_from:
                run.group = rest
            is_update = (step + 1) % accumulation == 0 or step + 1 == run.length
            if has_peers and not is_update:
                with strategy.no_sync(trainer.model):
                    perform(batch, step)
            else:
                perform(batch, step)
            step += 1
            if is_update:
                if has_peers and run.updates == 0:
                    strategy.check_averaged(trainer.model, as_list(trainer.optimizer))
                if clips:
                    trainer._clip_gradients()
                trainer.optimizer_step()
                if trainer.scheduler is not None and not strategy.optimizer_step_was_skipped:
                    trainer.scheduler_step()
                trainer.optimizer_zero_grad()
            run.batch = step
            if is_update and _after_update(trainer):
                break
        else:
            check_batch_count("training", step, run.length)
    finally:
        run.in_epoch = run.in_step = False
        run.group = 0


def _resolve_events(trainer: TrainingLoop) -> None:
    session = trainer._det_core
    handler = trainer.callback_handler
    session.step_start = event_caller(handler, "on_train_step_start")
    session.step_end = event_caller(handler, "on_train_step_end")
    session.on_update = event_caller(handler, "on_update")


def _after_update(trainer: TrainingLoop) -> bool:
    """Evaluate, report, save and stop as due after an update; return whether to leave the epoch."""
    session = trainer._det_core
    run = session.run
    managed = session.managed
    run.updates += 1
    run.in_step = False
    if session.on_update is not None:
        session.on_update(trainer)
    while run.after_update:
        session.catching_stop(run.after_update.pop(0))
    run.has_ended = run.has_ended or _is_at_limit(trainer)
    is_last = run.has_ended or run.batch == run.length  # the end of the epoch evaluates the same model
    is_due = run.evaluate_every and run.updates % run.evaluate_every == 0
    if is_due and not is_last and trainer.eval_dataset is not None:
        trainer._run_eval_epoch(trainer._eval_dataloader, is_intermediate=True)
    if managed is not None:
        if managed.wants_evaluation(trainer) and trainer.eval_dataset is not None:
            trainer._run_eval_epoch(trainer._eval_dataloader)
        managed.after_update(trainer)
    if session.ranks is not None and not run.is_leaving:
        _handle_stop_requests(trainer)
    run.in_step = True
    return run.has_ended or run.is_leaving


def epochs_of(config: TrainerRunConfig) -> int:
    """Return the number of epochs; unbounded if updates are limited and those of an epoch are unknown."""
    if limit_of(config) is not None and config.num_update_steps_per_epoch is None:
        return sys.maxsize
    return config.num_epochs


def limit_of(config: TrainerRunConfig) -> int | None:
    """Return the updates of all ranks together after which a run ends, or None if its epochs decide."""
    limit = config.max_num_train_steps
    per_epoch = config.num_update_steps_per_epoch
    # The default limit of the original, one update more than all epochs have, must not end a run: it is counted as if
    # there were one rank, and a resume with smaller batches has more updates.
    if per_epoch is not None and limit == config.num_epochs * per_epoch + 1:
        return None
    return limit


def _has_more(trainer: TrainingLoop) -> bool:
    """Return whether the rest of the current epoch or another one is to be trained."""
    run = trainer._det_core.run
    return run.batch > 0 or not (run.has_ended or run.epoch >= epochs_of(trainer.run_config))


def _is_at_limit(trainer: TrainingLoop) -> bool:
    """Return whether the updates of all ranks have reached the limit."""
    config = trainer.run_config
    limit = limit_of(config)
    return limit is not None and trainer._det_core.run.updates * config.num_processes >= limit


# Resumes and stops.


def _restore_random(trainer: TrainingLoop) -> None:
    resumed = trainer._det_core.resumed
    trainer._det_core.resumed = None
    if resumed is not None and resumed.random is not None:
        from det_core.core import set_random_state

        set_random_state(resumed.random)


def _handle_stop_requests(trainer: TrainingLoop) -> None:
    """Request a pending stop; when the ranks agree on one, save and return (preemption) or raise (script)."""
    # Ranks agree on the number of a call, so each of them must make the same number of calls.
    session = trainer._det_core
    if session.ranks is None:
        return
    if session.stop is not None and not session.has_asked:
        session.has_asked = True
        session.ranks.preempt.request(str(session.stop))
    if not session.ranks.preempt.should_preempt():
        return
    if not session.ranks.preempt.is_preemption:
        session.take_stop()
        raise AgreedStop(str(session.ranks.preempt.reason))
    session.preempted = session.run.is_leaving = True
    if session.managed is not None:
        session.managed.has_left = True
        session.managed.save(trainer)
    trainer.callback_handler.call_event("on_preempted", trainer)


def _is_stop(trainer: TrainingLoop, error: Exception) -> bool:
    """Return whether an error is a loader's that a stop has caused, such as a worker killed by the signal."""
    session = trainer._det_core
    run = session.run
    # Several ranks cannot stop together at it, as others may be within a batch: their loader was opened again, and
    # this is its second failure.
    if error is not session.loader_error or session.has_peers or session.ranks is None:
        return False
    if not is_caused_by_stop(error, session.ranks.preempt):
        return False
    if not run.part and run.batch != run.length:
        run.batch -= run.batch % run.accumulation  # gradients without an update are not in the checkpoint
    logger.warning("the loader failed after a signal to stop: %s", error)
    return True


def _agree_on_stops(trainer: TrainingLoop) -> None:
    """Stop all ranks at the end of an epoch or an evaluation if one of them requests it."""
    session = trainer._det_core
    if not session.has_peers:
        return
    stop, asked = session.take_stop()
    text = None
    if stop is not None:
        text = str(stop)
    everyone = session.ranks.distributed.allgather((text, asked))
    if any(asked for _, asked in everyone):  # wait for the answer, which would stop a later run
        while not session.ranks.preempt.should_preempt():
            continue
    if texts := [text for text, _ in everyone if text is not None]:
        raise AgreedStop(texts[0]) from stop


def _stopped(trainer: TrainingLoop, stop: StopTrainingError) -> StopTrainingError:
    """Print a stop that ends the run, and notify callbacks."""
    if trainer._det_core.has_peers and not isinstance(stop, AgreedStop):
        raise stop  # the others wait in a collective: end them as any error does
    trainer.print(stop)
    trainer.callback_handler.call_event("on_stop_training_error", trainer)
    return stop


# Evaluation.


@contextmanager
def _evaluation_state(trainer: TrainingLoop) -> Iterator[None]:
    """Give an evaluation a loss tracker; within a training epoch, also restore the modes of modules after it."""
    tracker = trainer._loss_tracker
    if not trainer._det_core.run.in_epoch:
        tracker.reset()
        yield
        return
    modes = [(module, module.training) for module in trainer.model.modules()]
    trainer._loss_tracker = type(tracker)()
    try:
        yield
    finally:
        trainer._loss_tracker = tracker
        for module, training in modes:
            module.training = training


def _eval_batches(trainer: TrainingLoop, valid_dl: Any) -> None:
    session = trainer._det_core
    handler = trainer.callback_handler
    for metric in by_name(session.metrics).values():
        metric.reset()
    start = event_caller(handler, "on_eval_step_start")
    end = event_caller(handler, "on_eval_step_end")
    count = 0
    for batch in evaluation_batches(session, valid_dl):
        count += 1
        if start is not None:
            start(trainer)
        output = trainer.calculate_eval_batch_loss(batch)
        trainer._update_loss_tracker(output["loss"], output["batch_size"])
        if session.metrics is not None:
            trainer.update_metrics(session.metrics, batch, output)
        if end is not None:
            end(trainer, batch=batch, batch_output=output)
    if session.has_peers and whole_length(valid_dl) is None:
        everyone = session.ranks.distributed.allgather(count)
        total = sum(everyone)
        if everyone != [share(total, rank, len(everyone), even=False) for rank in range(len(everyone))]:
            raise ValueError(
                f"the ranks differ in the evaluation data: they have {', '.join(map(str, everyone))} batches, which "
                "are not shares of the same data. Give all of them the same data"
            )
        check_batch_count("evaluation", total, None)
    elif count or not session.has_peers or whole_length(valid_dl) == 0:  # a share of one rank may be empty
        check_batch_count("evaluation", count, length_of(valid_dl))


def _record_metrics(trainer: TrainingLoop, metrics: Any, prefix: str) -> None:
    """Compute metrics over all ranks, and record them."""
    for name, metric in by_name(metrics).items():
        values = metric.compute()
        if not isinstance(values, Mapping):
            values = {name: values}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            trainer.run_history.update_metric(f"{prefix}{key}", value)
