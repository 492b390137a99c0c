"""Steps that ranks take together: if one of them fails, all of them raise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from det_core import errors
from det_core.core._distributed import Collectives, DistributedContext
from det_core.errors import CheckpointError, DetCoreError, DistributedError, StorageError

logger = logging.getLogger("det_core.core")
T = TypeVar("T")

_USER_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}


class RankGroup:
    """The ranks that take part in an operation.

    Args:
        call: the call of the script, to detect ranks that called something else.
        channel: collectives of these ranks; None for a rank on its own.
        rank: rank of this process in the job, for messages.
        index: position of this rank in the group; 0 is the chief of the group.
        size: number of ranks in the group.
        fallback: type in which a rank raises another's error that has no type of its own here.
    """

    def __init__(
        self,
        call: str,
        channel: Collectives | None,
        *,
        rank: int,
        index: int,
        size: int,
        fallback: type[DetCoreError] = CheckpointError,
    ) -> None:
        self.index = index
        self.size = size
        self._call = call
        self._channel = channel
        self._rank = rank
        self._fallback = fallback

    @classmethod
    def alone(cls, call: str, rank: int = 0) -> RankGroup:
        """Return the group of one rank."""
        return cls(call, None, rank=rank, index=0, size=1)

    def on_channel(self, channel: Collectives) -> RankGroup:
        """Return the same ranks on another channel."""
        used = channel if self.is_shared else None
        return RankGroup(self._call, used, rank=self._rank, index=self.index, size=self.size, fallback=self._fallback)

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks in the group."""
        return self._channel is not None

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief of the group."""
        return self.index == 0

    def gather(self, work: Callable[[], T]) -> list[T] | None:
        """Run ``work`` on every rank, and return all results on the chief, None elsewhere.

        Raises:
            Exception: If ``work`` failed on any rank: its error on that rank; elsewhere an error of the same kind,
                with the rank in its message.
        """
        if self._channel is None:
            return [work()]
        try:
            outcome: Any = (work(), None)
        except BaseException as e:
            lost = self.report_failure(e)
            # The loss of a rank explains the error: the chief has removed what this rank was about to use.
            if lost is not None and isinstance(e, CheckpointError):
                raise lost from e
            raise
        results, failures = self._exchange(self._channel, outcome)
        self._raise(failures)
        return results

    def on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, and return this rank's result once all are done; raise as :meth:`gather`."""
        own: list[T] = []
        self.gather(lambda: own.append(work()))
        return own[0]

    def on_chief(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the chief, and return its result on every rank; raise as :meth:`gather`."""
        if self._channel is None:
            return work()
        if not self.is_chief:
            result, failure = self._channel.broadcast(None)
            self._raise([failure] if failure else [])
            return result  # type: ignore[no-any-return]
        try:
            result = work()
        except BaseException as e:
            # The others wait in a broadcast: without one, a full disk of the chief would be their hang.
            self._channel.broadcast((None, _Failure.of(self._rank, e)))
            raise
        self._channel.broadcast((result, None))
        return result

    def report_failure(self, error: BaseException) -> DistributedError | None:
        """Take part in a :meth:`gather` of the others as a rank that failed. Does not raise ``error``.

        Returns:
            The reason why the others could not be notified, or None.
        """
        if self._channel is None:
            return None
        try:
            self._exchange(self._channel, (None, _Failure.of(self._rank, error)))
        except DistributedError as e:
            logger.warning("rank %d failed and could not notify the others: %s", self._rank, e)
            return e
        return None

    def _exchange(self, channel: Collectives, outcome: Any) -> tuple[list[Any] | None, list[_Failure]]:
        gathered = channel.gather((self._call, self._rank, *outcome))
        if gathered is None:
            return None, channel.broadcast(None)
        failures = [failure for _, _, _, failure in gathered if failure]
        calls = {call: rank for call, rank, _, _ in reversed(gathered)}
        if len(calls) > 1:
            listed = ", ".join(f"{call} on rank {rank}" for call, rank in calls.items())
            text = f"the ranks called different things: {listed}"
            failures = [_Failure(self._rank, "CollectiveMismatch", None, text)]
        return [result for _, _, result, _ in gathered], channel.broadcast(failures)

    def _raise(self, failures: list[_Failure]) -> None:
        if not failures:
            return
        if any(failure.kind == "InvalidHP" for failure in failures):
            raise SystemExit(0)  # as any other call does after a rank has raised it
        first_rank: dict[str, int] = {}
        for failure in failures:
            text = failure.text
            if self._kind(failure.kind).__name__ != failure.kind:
                text = f"{failure.kind}: {text}"
            first_rank.setdefault(text, failure.rank)
        message = "; ".join(f"rank {rank}: {text}" for text, rank in first_rank.items())
        kind = failures[0].kind
        number = failures[0].number
        if kind == "StorageError" and number is not None:
            raise StorageError(number, message)
        raise self._kind(kind)(message)

    def _kind(self, name: str) -> type[Exception]:
        """Return the type in which this rank raises an error of another rank."""
        kind = _USER_ERRORS.get(name) or getattr(errors, name, None)
        known = (self._fallback, DistributedError, *_USER_ERRORS.values())
        if isinstance(kind, type) and issubclass(kind, known):
            return kind
        return self._fallback


class _Failure(NamedTuple):
    rank: int
    kind: str
    number: int | None
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> _Failure:
        if isinstance(error, StorageError) and error.errno is not None:
            # The text of an OSError begins with its number, which its copy on the other ranks puts there again.
            return cls(rank, type(error).__name__, error.errno, str(error.args[-1]))
        return cls(rank, type(error).__name__, None, str(error))


def on_chief(distributed: DistributedContext, channel: str, work: Callable[[], T]) -> T:
    """Run ``work`` on the chief, and return its result on every rank.

    Raises:
        Exception: If ``work`` failed: its error on the chief; elsewhere an error of the same kind, with the rank in its
            message.
    """
    group = RankGroup(
        channel,
        distributed.channel(channel),
        rank=distributed.rank,
        index=distributed.rank,
        size=distributed.size,
        fallback=DetCoreError,
    )
    return group.on_chief(work)


def exit_if_job_ended(distributed: DistributedContext) -> None:
    """Exit if another rank has ended the whole job, as InvalidHP does. A lost rank is left to the collectives.

    Raises:
        SystemExit: If the job has ended; with status 0.
    """
    try:
        distributed.check()
    except DistributedError:
        return
