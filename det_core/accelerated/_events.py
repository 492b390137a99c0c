"""The events of a Trainer: what callbacks are, how they are called, and how one of them stops a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

NAN_LOSS = "Stopping training due to NaN loss in"
"""How the text of a stop begins that a loss has caused which is NaN or infinite."""


class StopTrainingError(Exception):
    """Raised in a callback or a method of the Trainer to end the training in good order."""


class AgreedStop(StopTrainingError):
    """A stop that all ranks have agreed on."""


class Stops:
    """The stop that this rank wants and the others do not know of yet.

    Attributes:
        several: whether there are other ranks.
        stop: the first one that was noted.
        has_asked: whether the others were asked for it, and have not agreed on the update yet.
    """

    def __init__(self) -> None:
        self.several = False
        self.stop: StopTrainingError | None = None
        self.has_asked = False

    def note_stop(self, stop: StopTrainingError) -> None:
        """A callback stops the training: at once where there is one rank; else this rank goes on, as the others count
        on it, until all have agreed."""
        if not self.several or isinstance(stop, AgreedStop):
            raise stop
        self.stop = self.stop or stop

    def try_to(self, call: Callable[[], Any]) -> None:
        """Call something that a stop may come out of."""
        try:
            call()
        except StopTrainingError as stop:
            self.note_stop(stop)

    def taken(self) -> tuple[StopTrainingError | None, bool]:
        """The stop and whether it was asked for; none is left."""
        mine = self.stop, self.has_asked
        self.stop = None
        self.has_asked = False
        return mine


class CallbackMethodNotImplementedError(AttributeError):
    """An event was asked of a callback that has no method of its name."""


class TrainerCallback:
    """Base class of callbacks. Every event is given the trainer, and arguments by name of which more may come.

    A callback may have ``state_dict()`` and ``load_state_dict(state)``: its state then is part of checkpoints and of
    training states. It is put back after :meth:`on_training_run_start`. Two more events are ``on_loaders_prepared``,
    before batches are counted, and ``on_run_closed``, however a run has ended.
    """

    def on_init_end(self, trainer: Any, **kwargs: Any) -> None:
        """The Trainer is made."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """A training run begins, or goes on after a resume."""

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """A training epoch begins, or goes on after a resume."""

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """A batch is about to be trained."""

    def on_train_step_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """The loss of a batch is known, not its gradients; given ``batch``, ``batch_output`` and ``step``, from 0."""

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """A training epoch is over, and its loss in the history."""

    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        """The optimizer has updated the model."""

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """An evaluation begins."""

    def on_eval_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """A batch is about to be evaluated."""

    def on_eval_step_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """A batch is evaluated. Given ``batch`` and ``batch_output``."""

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """An evaluation is over, and its metrics in the history."""

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Training and evaluation of an epoch are over."""

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """A training run is over; the model is unwrapped."""

    def on_preempted(self, trainer: Any, **kwargs: Any) -> None:
        """The run is saved and leaves, to be resumed; no other event follows."""

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """``evaluate()`` begins."""

    def on_evaluation_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """``evaluate()`` is over; the model is unwrapped."""

    def on_stop_training_error(self, trainer: Any, **kwargs: Any) -> None:
        """A :class:`StopTrainingError` ends the run."""


class CallbackHandler:
    """The callbacks of a Trainer, in order.

    Args:
        callbacks: classes or instances.

    Raises:
        ValueError: two of one class.
        TypeError: something that is no callback.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = []
        self._enabled = True  # False keeps all of them silent, as in the original
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add several; see :meth:`add_callback`."""
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as a class or an instance."""
        instance = callback() if isinstance(callback, type) else callback
        if not any(name.startswith("on_") for name in dir(instance)):
            raise TypeError(f"{callback!r} is no callback: it has no method on_…()")
        if type(instance) in map(type, self.callbacks):
            raise ValueError(
                f"there is a {type(instance).__name__} already among the callbacks: {', '.join(self.callback_list)}"
            )
        self.callbacks.append(instance)

    def clear_callbacks(self) -> None:
        """Remove all of them."""
        self.callbacks = []

    @property
    def callback_list(self) -> list[str]:
        """Their classes' names."""
        return [type(callback).__name__ for callback in self.callbacks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Fire an event, of any name; callbacks without a method of that name are passed over.

        Raises:
            Exception: what a callback raises, with a note that names callback and event; later ones are not called.
            StopTrainingError: a callback stops the training. Where there are several ranks the Trainer notes it
                instead, and the later callbacks are called, as the other ranks may wait in them.
        """
        if (call := self._resolved(event)) is not None and self._enabled:
            call(*args, **kwargs)

    def _resolved(self, event: str) -> Callable[..., None] | None:
        """What calls those who listen to an event; None: nobody does."""
        idle, methods = getattr(TrainerCallback, event, None), []
        for callback in self.callbacks:
            found = getattr(callback, "__dict__", {}).get(event) or getattr(type(callback), event, None)
            if found is not None and found is not idle:
                methods.append(getattr(callback, event))

        def call(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                try:
                    method(*args, **kwargs)
                except StopTrainingError as stop:
                    stops = getattr(args[0], "_det_core", None) if args else None
                    if not isinstance(stops, Stops):
                        raise
                    stops.note_stop(stop)
                except Exception as e:
                    if hasattr(e, "add_note"):
                        owner = type(getattr(method, "__self__", method)).__name__
                        e.add_note(f"raised by the callback {owner} in {event}")
                    raise

        return call if methods else None


def caller(handler: Any, event: str) -> Callable[..., None] | None:
    """What fires an event that comes with each batch, to be asked for anew each epoch; None: nobody listens.

    An event found anew each time costs 3 of 400 µs a step. A handler of the user's sees every event.
    """
    if getattr(type(handler), "call_event", None) is not CallbackHandler.call_event or "call_event" in vars(handler):
        return partial(handler.call_event, event)
    resolved: Callable[..., None] | None = handler._resolved(event) if handler._enabled else None
    return resolved
