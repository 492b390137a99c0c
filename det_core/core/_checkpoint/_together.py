"""Steps that several ranks take together: if one fails, all raise, and nobody waits for what will not come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from det_core import errors
from det_core.core._distributed import LaneLike
from det_core.errors import CheckpointError, DistributedError, StorageError

log = logging.getLogger("det_core.checkpoint")
T = TypeVar("T")


class _Failure(NamedTuple):
    rank: int
    kind: str
    number: int | None
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> _Failure:
        number = error.errno if isinstance(error, StorageError) else None
        text = error.args[-1] if number is not None else str(error)
        return cls(rank, type(error).__name__, number, str(text))


class Together:
    """The ranks that take part in an operation.

    Args:
        call: what the script called; ranks that called different things are told so.
        lane: the collectives among them; None: this rank is alone.
        rank: the number of this one in the job, as messages name it.
        index: the number of this one among those that take part; 0 is their chief.
        size: how many take part.
    """

    def __init__(self, call: str, lane: LaneLike | None, *, rank: int, index: int, size: int) -> None:
        self._call = call
        self._lane = lane
        self._rank = rank
        self.index = index
        self.size = size

    def on(self, lane: LaneLike) -> Together:
        """The same ranks on another lane."""
        return Together(self._call, lane, rank=self._rank, index=self.index, size=self.size)

    @property
    def shared(self) -> bool:
        """Whether there are others to be told."""
        return self._lane is not None

    @property
    def first(self) -> bool:
        """Whether this rank is the chief of those that take part."""
        return self.index == 0

    def gather(self, work: Callable[[], T]) -> list[T] | None:
        """Do ``work`` on every rank; the chief returns every rank's result, the others None.

        Raises:
            Exception: what ``work`` raised here; or, if it failed elsewhere, an error of the same kind that names
                the rank.
        """
        if self._lane is None:
            return [work()]
        try:
            outcome: Any = (work(), None)
        except BaseException as e:
            lost = self.fail(e)
            if lost is not None and isinstance(e, CheckpointError):  # e.g. what the chief removed when a rank had died
                raise lost from e
            raise
        results, failures = self._exchange(self._lane, outcome)
        _raise(failures)
        return results

    def each(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank, and return this one's result once all are done; raises like :meth:`gather`."""
        mine: list[T] = []
        self.gather(lambda: mine.append(work()))
        return mine[0]

    def chief(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the chief, and return its result on every rank; raises like :meth:`gather`."""
        if self._lane is None:
            return work()
        if not self.first:
            result, failure = self._lane.broadcast(None)
            _raise([failure] if failure else [])
            return result  # type: ignore[no-any-return]
        try:
            result = work()
        except BaseException as e:
            self._lane.broadcast((None, _Failure.of(self._rank, e)))
            raise
        self._lane.broadcast((result, None))
        return result

    def fail(self, error: BaseException) -> DistributedError | None:
        """Take part in a :meth:`gather` of the others by failing in it; ``error`` is under way and stays.

        Returns:
            why the others could not be told.
        """
        if self._lane is None:
            return None
        try:
            self._exchange(self._lane, (None, _Failure.of(self._rank, error)))
        except DistributedError as e:
            log.warning("rank %d could not tell the others that it failed: %s", self._rank, e)
            return e
        return None

    def _exchange(self, lane: LaneLike, outcome: Any) -> tuple[list[Any] | None, list[_Failure]]:
        gathered = lane.gather((self._call, self._rank, *outcome))
        if gathered is None:
            return None, lane.broadcast(None)
        failures = [failure for _, _, _, failure in gathered if failure]
        calls = {call: rank for call, rank, _, _ in reversed(gathered)}
        if len(calls) > 1:
            said = ", ".join(f"{call} on rank {rank}" for call, rank in calls.items())
            failures = [_Failure(self._rank, "CollectiveMismatch", None, f"the ranks called different things: {said}")]
        return [result for _, _, result, _ in gathered], lane.broadcast(failures)


def _raise(failures: list[_Failure]) -> None:
    if not failures:
        return
    if any(failure.kind == "InvalidHP" for failure in failures):
        raise SystemExit(0)  # as at any other call after a rank has raised it
    texts = {f"{'' if _is_ours(f.kind) else f.kind + ': '}{f.text}": f.rank for f in reversed(failures)}
    text = "; ".join(f"rank {rank}: {text}" for text, rank in reversed(texts.items()))
    kind = failures[0].kind
    if kind == "StorageError" and failures[0].number is not None:
        raise StorageError(failures[0].number, text)
    raise _kind(kind)(text)


def _is_ours(kind: str) -> bool:
    return _kind(kind).__name__ == kind


def _kind(name: str) -> type[Exception]:
    """The type that another rank's error has here: ours and a caller's mistakes keep theirs."""
    if name in ("ValueError", "TypeError", "RuntimeError"):
        return {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError}[name]
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, CheckpointError | DistributedError) else CheckpointError
