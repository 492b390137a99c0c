"""Errors of a loader during a stop: the trainers save before they leave.

A signal to all processes of a job may kill a worker that is still starting. The loader then raises between two batches.
A training on one rank saves and stops there. With several ranks, the others may be in the batch that this rank lacks,
and wait for its gradients: this rank reopens the loader, and gets the batch from new workers, until all stop at the
same call. A second failure at the same batch is raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from det_core import _clock
from det_core._standalone.stop_signals import is_worker_loss

logger = logging.getLogger("det_core")
_SIGNAL_TIMEOUT = 1.0
"""Seconds in which the signal that has killed a worker reaches this process too."""
_POLL_INTERVAL = 0.01


class StopRequests(Protocol):
    """The part of a ``PreemptContext`` that says whether a stop is pending."""

    @property
    def requested(self) -> bool:
        """Whether a stop is pending."""


class LoaderBatches(Iterator[Any]):
    """Batches of a loader, which is reopened if it fails while a stop is pending, once for each batch.

    Args:
        open_from: makes the iterator, called with 0.
        on_error: called with each error that is raised.
        preempt: state of the stop; None to never reopen the loader.
        reopen_from: makes the iterator after a failure, called with the number of batches drawn so far.
    """

    def __init__(
        self,
        open_from: Callable[[int], Iterator[Any]],
        on_error: Callable[[Exception], None],
        *,
        preempt: StopRequests | None,
        reopen_from: Callable[[int], Iterator[Any]],
    ) -> None:
        self._on_error = on_error
        self._preempt = preempt
        self._reopen_from = reopen_from
        self._drawn = 0
        self._failed_at: int | None = None
        try:
            self._batches = open_from(0)  # now, as it may draw random numbers
            return
        except Exception as e:
            self._check(e)
        self._reopen()

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception as e:
            self._check(e)
        else:
            self._drawn += 1
            return batch
        self._batches = iter(())  # ends the remaining workers, which the frames of the error no longer hold
        self._reopen()
        return next(self)

    def _reopen(self) -> None:
        try:
            self._batches = self._reopen_from(self._drawn)
        except Exception as e:
            self._on_error(e)
            raise

    def _check(self, error: Exception) -> None:
        """Raise an error of the loader, unless it should be reopened."""
        if self._preempt is None or self._failed_at == self._drawn or not is_caused_by_stop(error, self._preempt):
            self._on_error(error)
            raise error
        self._failed_at = self._drawn
        logger.warning(
            "the loader failed during a stop; reopening it, as the other ranks may wait for its batch: %s", error,
        )  # fmt: skip


def forget_workers(loader: Any) -> None:
    """Make a ``DataLoader`` with ``persistent_workers`` start new workers at its next iteration."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def is_caused_by_stop(error: Exception, preempt: StopRequests) -> bool:
    """Return whether a loader's error comes with a stop; wait up to a second for the stop if a worker has died."""
    # EOFError and ConnectionError: a child of forkserver or spawn died before it had read its task.
    may_be_signal = is_worker_loss(error) or isinstance(error, EOFError | ConnectionError)
    deadline = _clock.monotonic() + _SIGNAL_TIMEOUT
    while may_be_signal and not preempt.requested and _clock.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
    return preempt.requested
