"""What contexts ask of the ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from det_core.core._distributed import DistributedContext
from det_core.errors import DistributedError

T = TypeVar("T")


def on_chief(distributed: DistributedContext, lane: str, work: Callable[[], T]) -> T:
    """Run ``work`` on the chief and return its result on every rank.

    Raises:
        Exception: whatever ``work`` raised, on every rank alike; nobody waits for an answer that will not come.
    """
    if distributed.rank != 0:
        outcome = distributed.channel(lane).broadcast(None)
    else:
        try:
            outcome = (work(), None)
        except Exception as e:
            # The workers wait in the broadcast below: without this one they would wait for ever.
            distributed.channel(lane).broadcast((None, _picklable(e)))
            raise
        distributed.channel(lane).broadcast(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def exit_if_job_ended(distributed: DistributedContext) -> None:
    """End this rank if another one has ended the whole job, as InvalidHP does; a lost rank is left to the collectives.

    Raises:
        SystemExit: with status 0.
    """
    try:
        distributed.check()
    except DistributedError:
        return


def _picklable(error: Exception) -> Exception:
    """``error``, or one that says the same where it cannot be pickled."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    return error
