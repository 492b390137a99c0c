"""The loop of a training and of an evaluation: epochs, batches, updates, stops that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from det_core.accelerated import _state
from det_core.accelerated._data import length_of
from det_core.accelerated._events import NAN_LOSS, AgreedStop, CallbackHandler, StopTrainingError
from det_core.accelerated._managed import PREEMPTIONS, Managed, Ranks, counts_of
from det_core.accelerated._steps import TrainingSteps, named
from det_core.accelerated.tracking import LossTracker, RunHistory

if TYPE_CHECKING:
    from det_core import core


@dataclass
class Run:
    """What lives for one training run."""

    num_epochs: int = 0
    accumulation: int = 1
    max_steps: int | None = None
    """Updates of all ranks together after which the run ends."""
    clip_value: float | None = None
    clip_norm: float | None = None
    """Infinite: the norm is only tracked."""
    evaluate_every: int | None = None
    report_every: int | None = None
    checkpoint_every: int | str | None = None
    updates: int = 0
    """Optimizer updates, those before a resume included."""
    base: int = 0
    """Updates of earlier runs in this trial."""
    epoch: int = 0
    batch: int = 0
    part: int = 0
    """How much of the epoch under way is over: 1, its training; 2, its evaluation as well."""
    group: int = 1
    """Micro-batches in the accumulation group under way."""
    length: int | None = None
    """Batches in the epoch under way, where that is known."""
    in_epoch: bool = False
    in_step: bool = False
    """Between the first batch of an accumulation group and its update."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    stop: StopTrainingError | None = None
    """A stop that this rank wants and the others do not know of yet."""
    has_asked: bool = False
    """Whether this rank has asked the others for it, and they have not agreed on the update yet."""
    norms: list[Any] = field(default_factory=list)
    window: tuple[Any, Any] = (0.0, 0)
    """The epoch's sum of losses and count of samples when metrics were last reported in it."""
    ended: bool = False
    """The number of updates or the search says that training is over."""
    left: bool = False
    """The epoch under way is left in its middle, to be gone on with there: by a preemption, or as the search has
    nothing more for now."""


class TrainingLoop(TrainingSteps):
    """Runs what a Trainer has prepared. Whatever it calls through ``self`` may be overridden."""

    callback_handler: CallbackHandler
    run_history: RunHistory
    eval_dataset: Any = None
    preempted = False
    batch_loss: Any = None
    run_config: Any = None
    _accelerator: Any
    _loss_tracker: LossTracker
    _seed: int
    _profile: bool
    _on_nan: str
    _managed: Managed | None = None
    _ranks: core.Context | Ranks | None = None
    _resumed: _state.Resumed | None = None
    _train_dataloader: Any = None
    _eval_dataloader: Any = None
    _step_start: Callable[..., None] | None = None
    _step_end: Callable[..., None] | None = None
    _on_update: Callable[..., None] | None = None

    @property
    def updates_completed(self) -> int:
        """Optimizer updates of this run, those before a resume included."""
        return self._run.updates

    @property
    def steps_completed(self) -> int:
        """Optimizer updates since the trial began: what metrics and checkpoints are counted in."""
        return self._run.base + self._run.updates

    @property
    def _several(self) -> bool:
        return self._strategy.num_processes > 1

    def _unprepare(self) -> None:
        """Give model and optimizers back as they were given, whatever has happened."""
        self.model = self._strategy.unwrap_model(self.model)
        self._strategy.release(self.model)
        plain = [self._strategy.unwrap_optimizer(optimizer) for optimizer in self.optimizers]
        if plain:
            self.optimizer = plain if isinstance(self.optimizer, list | tuple) else plain[0]

    def _reseed(self, seed: int) -> None:
        """Order the data by another seed: that of the training which is resumed."""
        self._seed = seed
        for loader in (self._train_dataloader, self._eval_dataloader):
            if loader is not None:
                loader.reseed(seed)

    def _run_training(self) -> None:
        handler, managed, run = self.callback_handler, self._managed, self._run
        stopped: StopTrainingError | None = None
        try:
            self.training_run_start()
            handler.call_event("on_training_run_start", self)
            self._restore_callbacks()
            run.ended = self._is_at_limit()
            try:
                self._heed_requests()  # also the first call of a process, from which on signals are caught
                if managed is not None and not self.preempted:
                    managed.start(self)
                while not self._is_finished():
                    self._run_epoch()
                if self.preempted:
                    return
            except StopTrainingError as e:
                if self._several and not isinstance(e, AgreedStop):
                    raise  # the others are in the middle of something: this ends them as any error does
                stopped = e
                self.print(e)
                handler.call_event("on_stop_training_error", self)
            if managed is not None:
                managed.end(self, stopped)
            self.training_run_end()
            self._unprepare()
            handler.call_event("on_training_run_end", self)
        finally:
            handler.call_event("on_run_closed", self)
            if managed is not None:
                managed.close(self, stopped)
        if stopped is not None and str(stopped).startswith(NAN_LOSS):
            self._leave_after_nan(stopped)

    def _restore_callbacks(self) -> None:
        """Put back the states of callbacks, after they have reset themselves."""
        if self._resumed is not None:
            for callback in self.callback_handler:
                if (state := self._resumed.callbacks.get(type(callback).__name__)) is not None:
                    callback.load_state_dict(state)

    def _is_at_limit(self) -> bool:
        """Whether the updates of all ranks that were asked for are made."""
        run = self._run
        return run.max_steps is not None and run.updates * self._strategy.num_processes >= run.max_steps

    def _is_finished(self) -> bool:
        """Whether there is nothing more to train; within an epoch, its end is still to come."""
        run = self._run
        return run.left or (not run.batch and (run.ended or run.epoch >= run.num_epochs))

    def _run_epoch(self) -> None:
        run = self._run
        if run.part:
            self._restore_random()
        else:
            self._run_train_epoch(self._train_dataloader)
        if run.left:
            return
        if self.eval_dataset is not None and run.part < 2:
            self._run_eval_epoch(self._eval_dataloader)
        run.part = 2
        self._together(self.training_run_epoch_end)
        self._together(self.callback_handler.call_event, "on_training_run_epoch_end", self)
        if run.max_steps is not None and run.ended:
            self.print(
                f"Reached max number of training steps {run.max_steps} in epoch {self.run_history.current_epoch}"
            )
        self.run_history._increment_epoch()
        run.epoch, run.batch, run.part = run.epoch + 1, 0, 0
        if self._managed is not None:
            self._managed.after_epoch(self)

    def _run_train_epoch(self, train_dl: Any) -> bool:
        """Train an epoch, or the rest of one; whether this is the last one, as the updates asked for are made."""
        run, handler, whole = self._run, self.callback_handler, self._train_dataloader
        if not run.batch:
            self._restore_random()
        self._together(self.train_epoch_start)
        if not run.batch:
            self._loss_tracker.reset()
            run.norms, run.window = [], (0.0, 0)
            for metric in named(self._train_metrics).values():
                metric.reset()
        self._together(handler.call_event, "on_train_epoch_start", self)
        if train_dl is whole:
            train_dl = self._train_dataloader  # a callback may have put another in its place
        run.length = length_of(train_dl)
        self._train_batches(train_dl)
        if run.left:
            return run.ended
        self._together(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        if run.norms:
            self.run_history.update_metric("train_gradient_norm", float(torch.stack(run.norms).mean()))
        self._record_metrics(self._train_metrics, "train_")
        run.part = 1
        self._together(handler.call_event, "on_train_epoch_end", self)
        if self._managed is not None:
            self._managed.report_epoch(self)
        return run.ended

    def _train_batches(self, train_dl: Any) -> None:
        run, handler = self._run, self.callback_handler
        if callable(begin := getattr(train_dl, "begin", None)):
            begin(run.epoch, run.batch)
        batches = iter(train_dl)
        if run.length is None:
            batches = self._in_groups(batches)
        self._step_start, self._step_end = handler.caller("on_train_step_start"), handler.caller("on_train_step_end")
        self._on_update = handler.caller("on_update")
        if self._managed is not None:
            self._managed.start_epoch(self)
        self._restore_random()  # in the middle of an epoch last of all: what comes before may draw random numbers
        perform, accumulation, step = self._perform_forward_and_backward_passes, run.accumulation, run.batch
        run.in_epoch = run.in_step = True
        run.group, rest = accumulation, (run.length or 0) % accumulation
        short_from = (run.length or 0) - rest if rest else None
        try:
            if run.ended:
                return
            for batch in batches:
                if step == run.length:  # of a loader without begin(), after a resume
                    break
                if step == short_from:
                    run.group = rest
                perform(batch, step)
                step += 1
                run.batch = step
                if (step % accumulation == 0 or step == run.length) and self._after_update():
                    break
        finally:
            run.in_epoch = run.in_step = False

    def _restore_random(self) -> None:
        if self._resumed is not None and self._resumed.random is not None:
            from det_core.core import set_random_state

            set_random_state(self._resumed.random)
        self._resumed = None

    def _in_groups(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches of a loader without a length, drawn an accumulation group ahead, so that the last one is known."""
        run, drawn = self._run, self._run.batch
        while group := list(islice(batches, run.accumulation)):
            drawn += len(group)
            if len(group) < run.accumulation:
                run.length, run.group = drawn, len(group)
            yield from group

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        run = self._run
        if self._step_start is not None:
            self._in_step(self._step_start, self)
        if (step + 1) % run.accumulation and step + 1 != run.length:
            with self._strategy.no_sync(self.model) if self._several else nullcontext():
                self._forward_and_backward(batch, step)
            return
        self._forward_and_backward(batch, step)
        if run.clip_value is not None or run.clip_norm is not None:
            self._clip_gradients()
        self.optimizer_step()
        if self.scheduler is not None and not self._strategy.optimizer_step_was_skipped:
            self.scheduler_step()
        self.optimizer_zero_grad()

    def _forward_and_backward(self, batch: Any, step: int) -> None:
        run = self._run
        output = self.calculate_train_batch_loss(batch)
        loss = output["loss"]
        self.batch_loss = None
        self._update_loss_tracker(loss, output["batch_size"])
        if self._train_metrics is not None:
            self.update_metrics(self._train_metrics, batch, output)
        if self._step_end is not None:
            self._in_step(self._step_end, self, batch=batch, batch_output=output, step=step)
        if run.accumulation > 1 and self._several and "num_items_in_batch" in output:
            loss = loss * self._strategy.num_processes  # a mean over the tokens of all ranks already
        if run.group > 1:
            loss = loss / run.group
        self.backward_step(loss)

    def _in_step(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call what belongs to a step. If it stops the training, leave at once where there is one rank; else finish the
        step, as the others count on it, and note that this rank wants a stop."""
        try:
            call(*args, **kwargs)
        except StopTrainingError as stop:
            if not self._several or isinstance(stop, AgreedStop):
                raise
            self._run.stop = self._run.stop or stop

    def _after_update(self) -> bool:
        """What comes between an update and the next batch; whether to leave the epoch."""
        run, managed = self._run, self._managed
        run.updates += 1
        run.in_step = False
        if self._on_update is not None:
            self._in_step(self._on_update, self)
        while run.after_update:
            self._in_step(run.after_update.pop(0))
        run.ended = run.ended or self._is_at_limit()
        is_last = run.ended or run.batch == run.length  # whose model the epoch's end evaluates
        every = None if is_last or self.eval_dataset is None else run.evaluate_every
        if every and run.updates % every == 0:
            self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)
        if managed is not None and run.updates >= managed.due:
            managed.after_update(self)
        if not run.left:
            self._heed_requests()
        run.in_step = True
        return run.ended or run.left

    def _heed_requests(self) -> None:
        """Ask for the stop that this rank wants; if all have agreed on one, save and leave, or, if only the script
        asked for it, stop training. Each rank makes equally many of these calls."""
        if self._ranks is None:
            return
        if self._run.stop is not None and not self._run.has_asked:
            self._run.has_asked = True
            self._ranks.preempt.request(str(self._run.stop))
        if not self._ranks.preempt.should_preempt():
            return
        reason = str(self._ranks.preempt.reason)
        if reason not in PREEMPTIONS:
            self._run.stop, self._run.has_asked = None, False
            raise AgreedStop(reason)
        self.preempted = self._run.left = True
        if self._managed is not None:
            self._managed.has_left = True
            self._managed.save(self)
        self.callback_handler.call_event("on_preempted", self)

    def _together(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call a method or an event that every rank comes to: if it stops the training on one, all stop, at its end.

        Callbacks of an event may wait for the other ranks, as a stop on one of them comes after its last callback. A
        method may only stop where the other ranks do not wait for this one.
        """
        self._in_step(call, *args, **kwargs)
        if not self._several:
            return
        run, stop = self._run, self._run.stop
        asked, run.stop, run.has_asked = run.has_asked, None, False
        assert self._ranks is not None
        everyone = self._ranks.distributed.allgather((None if stop is None else str(stop), asked))
        if any(asked for _, asked in everyone):  # not answered yet; later runs are not to be stopped by it
            while not self._ranks.preempt.should_preempt():
                continue
        texts = [text for text, _ in everyone if text is not None]
        if texts:
            raise AgreedStop(texts[0]) from stop

    def _leave_after_nan(self, stop: StopTrainingError) -> None:
        if self._on_nan == "raise":
            raise stop
        if self._on_nan == "exit" and self._managed is None:
            raise SystemExit("Exiting due to NaN loss")

    # the evaluation

    def _run_evaluation(self) -> None:
        handler = self.callback_handler
        try:
            self.evaluation_run_start()
            handler.call_event("on_evaluation_run_start", self)
            try:
                self._run_eval_epoch(self._eval_dataloader, is_training=False)
            except StopTrainingError as e:
                if self._several and not isinstance(e, AgreedStop):
                    raise
                self.print(e)
                handler.call_event("on_stop_training_error", self)
            self.evaluation_run_end()
            self._unprepare()
            handler.call_event("on_evaluation_run_end", self)
        finally:
            handler.call_event("on_run_closed", self)

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate on all batches of a loader.

        Args:
            valid_dl: the loader.
            is_training: whether this is part of a training run.
            is_intermediate: whether training goes on in the same epoch: its metrics do not stay in the history.
        """
        handler, whole = self.callback_handler, self._eval_dataloader
        kind = "intermediate_eval" if is_intermediate else "eval" if is_training else "evaluation"
        before = counts_of(self.run_history)
        with self._evaluation_state():
            self._together(self.eval_epoch_start)
            self._together(handler.call_event, "on_eval_epoch_start", self, is_intermediate=is_intermediate)
            if valid_dl is whole:
                valid_dl = self._eval_dataloader
            with torch.no_grad(), self._strategy.evaluating(self.model):
                self._eval_batches(valid_dl)
            self._together(self.eval_epoch_end)
            self._add_epoch_loss_to_run_history("eval_loss_epoch" if kind == "eval" else f"{kind}_loss")
            self._record_metrics(self._eval_metrics, f"{kind}_")
            self._together(handler.call_event, "on_eval_epoch_end", self, is_intermediate=is_intermediate)
        if self._managed is not None:
            self._managed.report_evaluation(self, before, "validation" if is_training else "evaluation")
        if is_intermediate:
            passing = f"{self.run_history.metric_name_prefix}intermediate_eval_"
            for name in [n for n in self.run_history.get_metric_names() if n.startswith(passing)]:
                self.run_history.delete_metric(name)

    @contextmanager
    def _evaluation_state(self) -> Iterator[None]:
        """A loss tracker for the evaluation; in the middle of an epoch its own, and modules get their modes back."""
        tracker = self._loss_tracker
        if not self._run.in_epoch:
            tracker.reset()
            yield
            return
        modes = [(module, module.training) for module in self.model.modules()]
        self._loss_tracker = type(tracker)()
        try:
            yield
        finally:
            self._loss_tracker = tracker
            for module, training in modes:
                module.training = training

    def _eval_batches(self, valid_dl: Any) -> None:
        step_start = self.callback_handler.caller("on_eval_step_start")
        step_end = self.callback_handler.caller("on_eval_step_end")
        for metric in named(self._eval_metrics).values():
            metric.reset()
        for batch in valid_dl:
            if step_start is not None:
                self._in_step(step_start, self)
            output = self.calculate_eval_batch_loss(batch)
            self._update_loss_tracker(output["loss"], output["batch_size"])
            if self._eval_metrics is not None:
                self.update_metrics(self._eval_metrics, batch, output)
            if step_end is not None:
                self._in_step(step_end, self, batch=batch, batch_output=output)

    # losses and metrics

    def _update_loss_tracker(self, batch_loss: Any, batch_size: int) -> None:
        """Count a batch's loss. On a CPU it is read once, for everybody; on another device nobody waits for it."""
        try:
            value = batch_loss.item() if batch_loss.is_cpu else batch_loss.detach().mean()
        except RuntimeError:
            raise ValueError(
                f"the loss of a batch has the shape {tuple(batch_loss.shape)}: expected a scalar, as losses with "
                "reduction='mean' give"
            ) from None
        self.batch_loss = value
        self._loss_tracker.update(value, batch_size)

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Record the mean loss of all samples, of all ranks."""
        tracker = self._loss_tracker
        total, count = self._strategy.sums([tracker.total_loss, tracker.running_count]).tolist()
        self.run_history.update_metric(metric_name, total / count if count else float("nan"))

    def _record_metrics(self, metrics: Any, prefix: str) -> None:
        """Compute what was counted, over all ranks, and record it."""
        for name, metric in named(metrics).items():
            value = metric.compute()
            for key, one in (value if isinstance(value, Mapping) else {name: value}).items():
                number = isinstance(one, torch.Tensor) and one.numel() == 1
                self.run_history.update_metric(f"{prefix}{key}", one.item() if number else one)
