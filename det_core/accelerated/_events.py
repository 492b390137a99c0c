"""The events of a Trainer: what callbacks are, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.accelerated.trainer import Trainer

NAN_LOSS = "Stopping training due to NaN loss in"
"""How the text of a stop begins that a loss has caused which is NaN or infinite."""


class StopTrainingError(Exception):
    """Raised in a callback or a method of the Trainer to end the training in good order."""


class AgreedStop(StopTrainingError):
    """A stop of the training that every rank knows of."""


class CallbackMethodNotImplementedError(AttributeError):
    """An event was asked of a callback that has no method of its name."""


class TrainerCallback:
    """Base class of callbacks. Every event is given the trainer, and arguments by name of which more may come.

    A callback may have ``state_dict()`` and ``load_state_dict(state)``: its state then is part of checkpoints and of
    training states. It is put back after :meth:`on_training_run_start`.
    """

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """The Trainer is made."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run begins, or goes on after a resume."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch begins, or goes on after a resume."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be trained."""

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        """The loss of a batch is known; gradients are not computed yet."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch is over, and its loss in the history."""

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """An evaluation begins."""

    def on_eval_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be evaluated."""

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """A batch is evaluated."""

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """An evaluation is over, and its metrics in the history."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Training and evaluation of an epoch are over."""

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run is over; the model is unwrapped."""

    def on_preempted(self, trainer: Trainer, **kwargs: Any) -> None:
        """The run is saved and leaves, to be resumed; no other event follows."""

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """``evaluate()`` begins."""

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """``evaluate()`` is over; the model is unwrapped."""

    def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
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
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add several; see :meth:`add_callback`."""
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as a class or an instance."""
        instance = callback() if isinstance(callback, type) else callback
        if not isinstance(instance, TrainerCallback) and not any(name.startswith("on_") for name in dir(instance)):
            raise TypeError(f"{callback!r} is no callback: it is no TrainerCallback, and has no method on_…()")
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
            StopTrainingError: a callback stops the training. Where there are several ranks this comes after the later
                ones, in which the other ranks may wait for this one.
        """
        caller = self._resolve(event)
        if caller is not None:
            caller(*args, **kwargs)

    def caller(self, event: str) -> Callable[..., None] | None:
        """What fires an event that comes often, or None where nobody listens; to be asked again each epoch."""
        if type(self).call_event is not CallbackHandler.call_event:  # a handler of the user's sees every event
            return partial(self.call_event, event)
        return self._resolve(event)

    def _resolve(self, event: str) -> Callable[..., None] | None:
        idle = getattr(TrainerCallback, event, None)
        methods = []
        for callback in self.callbacks:
            found = getattr(callback, "__dict__", {}).get(event) or getattr(type(callback), event, None)
            if found is not None and found is not idle:
                methods.append(getattr(callback, event))
        if not methods:
            return None

        def call(*args: Any, **kwargs: Any) -> None:
            stop: StopTrainingError | None = None
            for method in methods:
                try:
                    method(*args, **kwargs)
                except AgreedStop:
                    raise
                except StopTrainingError as e:
                    if not args or getattr(args[0], "_several", False) is not True:
                        raise
                    stop = stop or e
                except Exception as e:
                    if hasattr(e, "add_note"):
                        owner = type(getattr(method, "__self__", method)).__name__
                        e.add_note(f"raised by the callback {owner} in {event}")
                    raise
            if stop is not None:
                raise stop

        return call
