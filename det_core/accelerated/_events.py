"""Events of a Trainer: callbacks, their handler, and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

NAN_LOSS = "Stopping training due to NaN loss in"
"""First words of a stop caused by a loss that is NaN or infinite."""


class StopTrainingError(Exception):
    """Raise it in a callback or a method of the Trainer to end the training in order."""


class AgreedStop(StopTrainingError):
    """A stop agreed on by all ranks."""


class PendingStop:
    """Stop request of this rank that the others do not know yet.

    Attributes:
        has_peers: whether there are other ranks.
        stop: first stop of this rank, or None.
        has_asked: whether it was sent to the others, which have not agreed on an update yet.
    """

    def __init__(self) -> None:
        self.has_peers = False
        self.stop: StopTrainingError | None = None
        self.has_asked = False

    def note_stop(self, stop: StopTrainingError) -> None:
        """Raise a stop on a single rank; on several, keep it until all have agreed."""
        # Until then this rank continues, as the others wait for it in collectives.
        if not self.has_peers or isinstance(stop, AgreedStop):
            raise stop
        self.stop = self.stop or stop

    def catching_stop(self, call: Callable[[], Any]) -> None:
        """Call a function that may raise a stop."""
        try:
            call()
        except StopTrainingError as stop:
            self.note_stop(stop)

    def take_stop(self) -> tuple[StopTrainingError | None, bool]:
        """Remove and return the stop, and whether it was sent."""
        stop = self.stop
        has_asked = self.has_asked
        self.stop = None
        self.has_asked = False
        return stop, has_asked


class CallbackMethodNotImplementedError(AttributeError):
    """A callback has no method for an event."""


class TrainerCallback:
    """Base class of callbacks. Every event gets the trainer and keyword arguments; accept further ones.

    If a callback has ``state_dict()`` and ``load_state_dict(state)``, its state is part of checkpoints and training
    states, and is restored after :meth:`on_training_run_start`. There are two further events: ``on_loaders_prepared``,
    before batches are counted, and ``on_run_closed``, after every run.
    """

    def on_init_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after the Trainer is made."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run at the start of a training run, also of a resumed one."""

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run at the start of a training epoch, also of a resumed one."""

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run before a batch is trained."""

    def on_train_step_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Run after the loss of a batch, before gradients, with ``batch``, ``batch_output`` and ``step`` (from 0)."""

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after a training epoch, with its loss in the history."""

    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        """Run after an optimizer update."""

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run at the start of an evaluation."""

    def on_eval_step_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run before a batch is evaluated."""

    def on_eval_step_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Run after a batch is evaluated, with ``batch`` and ``batch_output``."""

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after an evaluation, with its metrics in the history."""

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after training and evaluation of an epoch."""

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after a training run, with the model unwrapped."""

    def on_preempted(self, trainer: Any, **kwargs: Any) -> None:
        """Run after a preempted run is saved; no other event follows."""

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        """Run at the start of ``evaluate()``."""

    def on_evaluation_run_end(self, trainer: Any, **kwargs: Any) -> None:
        """Run after ``evaluate()``, with the model unwrapped."""

    def on_stop_training_error(self, trainer: Any, **kwargs: Any) -> None:
        """Run when a :class:`StopTrainingError` ends the run."""


class CallbackHandler:
    """Callbacks of a Trainer in order.

    Args:
        callbacks: classes or instances.

    Raises:
        ValueError: If two have the same class.
        TypeError: If one is not a callback.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = []
        self._enabled = True  # scripts set it to False to silence all callbacks
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks; see :meth:`add_callback`."""
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as a class or an instance."""
        instance = callback
        if isinstance(callback, type):
            instance = callback()
        if not any(name.startswith("on_") for name in dir(instance)):
            raise TypeError(f"{callback!r} is not a callback: it has no method on_…()")
        if type(instance) in map(type, self.callbacks):
            raise ValueError(
                f"duplicate callback {type(instance).__name__}: the callbacks are {', '.join(self.callback_list)}"
            )
        self.callbacks.append(instance)

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = []

    @property
    def callback_list(self) -> list[str]:
        """Names of the callbacks' classes."""
        return [type(callback).__name__ for callback in self.callbacks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call an event of any name on the callbacks that have a method for it.

        Raises:
            Exception: Errors of callbacks, with a note that names callback and event; later callbacks are not called.
            StopTrainingError: If a callback stops the training on a single rank. On several ranks, the Trainer keeps
                the stop and calls the later callbacks, as the other ranks may wait in them.
        """
        if (call := self._resolved(event)) is not None and self._enabled:
            call(*args, **kwargs)

    def _resolved(self, event: str) -> Callable[..., None] | None:
        """Return a function that calls the event on all callbacks that override it, or None if none does."""
        idle = getattr(TrainerCallback, event, None)
        methods = []
        for callback in self.callbacks:
            method = getattr(callback, "__dict__", {}).get(event) or getattr(type(callback), event, None)
            if method is not None and method is not idle:
                methods.append(getattr(callback, event))

        def call(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                try:
                    method(*args, **kwargs)
                except StopTrainingError as stop:
                    session = None
                    if args:
                        session = getattr(args[0], "_det_core", None)
                    if not isinstance(session, PendingStop):
                        raise
                    session.note_stop(stop)
                except Exception as e:
                    if hasattr(e, "add_note"):
                        owner = type(getattr(method, "__self__", method)).__name__
                        e.add_note(f"raised by the callback {owner} in {event}")
                    raise

        if not methods:
            return None
        return call


def event_caller(handler: Any, event: str) -> Callable[..., None] | None:
    """Return a function that calls an event of each batch, or None if no callback has it; valid for one epoch."""
    # Looking it up for every batch costs 3 of 400 µs. A user-defined handler sees every event.
    if getattr(type(handler), "call_event", None) is not CallbackHandler.call_event or "call_event" in vars(handler):
        return partial(handler.call_event, event)
    if not handler._enabled:
        return None
    resolved: Callable[..., None] | None = handler._resolved(event)
    return resolved
