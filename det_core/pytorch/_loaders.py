"""Loaders of one fit: build them for one rank and position, and convert numbers of batches to positions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from torch.utils import data
from torch.utils.data import BatchSampler

from det_core import core
from det_core._training.data_order import EpochOrder, Position, length_of
from det_core._training.loader_errors import LoaderBatches, forget_workers
from det_core.errors import InvalidExperimentException
from det_core.pytorch._data import DataLoader
from det_core.pytorch._trial import Trial
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")


@dataclass(frozen=True)
class BatchDistribution:
    """Distribution of batches over ranks in one fit, which converts a number of trained batches to a position.

    Attributes:
        pass_batches: number of batches in a pass over the dataset.
        batch_size: number of records in each; None if a batch_sampler of the user decides.
        skip: number of batches that each rank skipped at the start.
        origin: number of batches trained when the fit began.
    """

    pass_batches: int
    batch_size: int | None
    skip: int
    origin: int


class Loaders:
    """Loaders of one fit.

    Args:
        rank: rank whose share of the batches to take. Defaults to this rank.
        size: number of ranks that share them. Defaults to all.
        each: number of loader batches in one training batch.

    Attributes:
        distribution: distribution of batches over ranks; None before building, for a loader of the user, and without
            a length.
        lengths: numbers of records and batches of ``pytorch.DataLoader`` objects, which must be equal on every rank.
        error: last error of a loader, or None.
    """

    def __init__(
        self, trial: Trial, context: TrialContext, *, rank: int | None = None, size: int | None = None, each: int = 1
    ) -> None:
        self._trial = trial
        self._context = context
        self._each = each
        if rank is None:
            rank = context.distributed.rank
        if size is None:
            size = context.distributed.size
        self._rank = rank
        self._size = size
        self._validation: Any = None
        self._resumable: core.ResumableLoader[Any] | None = None
        self.distribution: BatchDistribution | None = None
        self.lengths: dict[str, int | None] = {}
        self.error: Exception | None = None

    def build(
        self, position: Position, *, full_validation: bool, state: Mapping[str, Any] | None = None
    ) -> tuple[Iterator[Any], int | None]:
        """Build both loaders; return the training batches from ``position`` on, and the length of a rank's pass.

        Args:
            position: number of trained batches, and seed of the order.
            full_validation: whether each rank gets the whole validation set.
            state: return value of :meth:`state` at the checkpoint, for a DataLoader of the user.
        """
        training = self._trial.build_training_data_loader()
        self._check(training, "build_training_data_loader")
        training = _unrepeated(training)  # it has a length, and passes are repeated here
        if isinstance(training, DataLoader):
            batch_size = None
            if not training.batches_by_user:
                batch_size = training.batch_size
            pass_batches = self._note_length("training", training)
            skip = self._batches_to_skip(position, pass_batches, batch_size, length_of(training.dataset))
            self.distribution = None
            if pass_batches is not None:
                self.distribution = BatchDistribution(pass_batches, batch_size, skip, position.batches)
            batches, length = self._training(training, position.seed, skip)
        else:
            batches = self._user_defined(training, position, state)
            length = length_of(training)
        validation = self._trial.build_validation_data_loader()
        self._check(validation, "build_validation_data_loader")
        validation = _unrepeated(validation)
        if isinstance(validation, DataLoader):
            self._note_length("validation", validation)
            if full_validation:
                validation = validation.validation(position.seed, rank=0, size=1)
            else:
                validation = validation.validation(position.seed, rank=self._rank, size=self._size)
        self._validation = validation
        return batches, length

    def _training(self, data: DataLoader, seed: int, skip: int) -> tuple[Iterator[Any], int | None]:
        """Return this rank's endless batches after ``skip``, and the length of a pass."""

        def loader(drawn: int) -> Any:
            return data.training(seed, rank=self._rank, size=self._size, skip=skip + drawn)

        return self._guard(lambda drawn: _expect_endless(iter(loader(drawn)))), length_of(loader(0))

    def _user_defined(self, loader: Any, position: Position, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """Return the endless batches of a user-defined loader; a torch DataLoader resumes at its position."""
        self._resumable = None
        reason = "the checkpoint does not have its position"
        resumable = loader
        try:
            if isinstance(loader, data.DataLoader):
                resumable = core.resumable(loader)
            if isinstance(resumable, core.ResumableLoader):
                self._resumable = resumable
                if state is not None:
                    resumable.load_state_dict(state)
        except ValueError as e:
            state = None
            reason = str(e)
        if position.batches and (state is None or self._resumable is None):
            logger.warning("a user-defined loader starts from its beginning, so this resume is not exact: %s", reason)
        if self._resumable is None:
            return self._guard(lambda _drawn: _endless(loader), loader)

        def open_from(drawn: int) -> Iterator[Any]:
            if drawn:  # reopened after an error of the loader
                resumable.load_state_dict(resumable.state_dict())
            if drawn or state is not None:  # iter() now: later code draws random numbers
                return chain(iter(resumable), _endless(resumable))
            return _endless(resumable)

        return self._guard(open_from, resumable.loader)

    def state(self) -> dict[str, Any] | None:
        """Return the position of this rank in a torch DataLoader of the user, or None for other loaders."""
        if self._resumable is None:
            return None
        return self._resumable.state_dict()

    def validation(self) -> tuple[Iterator[Any], int | None]:
        """Return a new pass over the validation loader, and its number of batches.

        It has this rank's share, or the whole set after ``build(full_validation=True)``.
        """
        loader = self._validation
        one_pass = self._guard(lambda drawn: islice(_one_pass(loader, "validation"), drawn, None), loader)
        return one_pass, length_of(loader)

    def _guard(self, open_from: Callable[[int], Iterator[Any]], loader: Any = None) -> Iterator[Any]:
        """Return batches, and keep their errors; on several ranks, reopen a loader that fails during a stop."""

        def note(error: Exception) -> None:
            self.error = error

        def reopen_from(drawn: int) -> Iterator[Any]:
            forget_workers(loader)  # persistent ones may be dead
            return open_from(drawn)

        preempt = None
        if self._context.distributed.size > 1:
            preempt = self._context._core.preempt
        return LoaderBatches(open_from, note, preempt=preempt, reopen_from=reopen_from)

    def whole_validation(self) -> Any:
        """Return the validation loader after ``build(full_validation=True)``: a torch loader, or the user's own."""
        return self._validation

    def position(self, start: Position, batches_trained: int) -> Position:
        """Return the position in the data after this number of batches of this rank."""
        distribution = self.distribution
        if distribution is None:
            return Position(start.seed, batches_trained, 0, 0, None, self._size)
        done = ((batches_trained - distribution.origin) * self._each + distribution.skip) * self._size
        pass_, batch = divmod(done, distribution.pass_batches)
        if distribution.batch_size is None:
            return Position(start.seed, batches_trained, pass_, 0, None, self._size)
        records = batch * distribution.batch_size
        global_batch_size = distribution.batch_size * self._each * self._size
        return Position(start.seed, batches_trained, pass_, records, global_batch_size, self._size)

    def _batches_to_skip(
        self, position: Position, pass_batches: int | None, batch_size: int | None, dataset: int | None
    ) -> int:
        """Return the number of this rank's batches to skip to reach ``position``."""
        each = self._each
        if batch_size is None or position.global_batch_size is None or pass_batches is None:
            if position.size != self._size and position.batches:
                logger.warning(
                    "resuming on %d rank(s) a training of %d: with your own batch_sampler, or a checkpoint of another "
                    "program, this resume is not exact", self._size, position.size,
                )  # fmt: skip
            return position.batches * each
        # Counted in records, as another number of ranks, or another batch size, may resume.
        done = position.pass_ * pass_batches + math.ceil(position.records / batch_size)
        skip = math.ceil(done / (self._size * each)) * each
        global_batch_size = batch_size * each * self._size
        if (position.size, position.global_batch_size) != (self._size, global_batch_size) and (
            position.global_batch_size != global_batch_size or dataset is None or dataset % global_batch_size
        ):
            pass_, batch = divmod(skip * self._size, pass_batches)
            logger.warning(
                "resuming on %d rank(s) with %d records a step a training of %d rank(s) with %d: it continues at "
                "record %d of pass %d, and was at record %d of pass %d",
                self._size, global_batch_size, position.size, position.global_batch_size, batch * batch_size, pass_,
                position.records, position.pass_,
            )  # fmt: skip
        return skip

    def _note_length(self, which: str, loader: DataLoader) -> int | None:
        batches = length_of(loader)
        self.lengths |= {f"records of {which} data": length_of(loader.dataset), f"batches of {which} data": batches}
        return batches

    def _check(self, loader: Any, method: str) -> None:
        if not isinstance(loader, DataLoader) and not self._context._any_loader:
            raise InvalidExperimentException(
                f"{method}() returned a {type(loader).__name__}: expected a det_core.pytorch.DataLoader; for any other "
                f"loader, call {self._context._any_loader_call} in __init__()"
            )


def _expect_endless(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of an endless loader; raise RuntimeError if it ends."""
    yield from batches
    raise RuntimeError("the endless training loader ended: its dataset raised StopIteration")


def _unrepeated(loader: Any) -> Any:
    """Return the loader inside of DeepSpeed's RepeatingLoader, as :func:`_endless` repeats passes itself."""
    if type(loader).__name__ == "RepeatingLoader" and hasattr(loader, "loader"):
        return loader.loader
    return loader


def _endless(loader: Any) -> Iterator[Any]:
    """Repeat passes without end.

    Raises:
        RuntimeError: If a pass has no batch, or fewer than its length.
    """
    for number in count(1):
        batch = None
        for batch in _one_pass(loader, "training"):
            yield batch
        if batch is None:
            if number > 1:
                raise RuntimeError(f"the training loader has no batch in pass {number}: it can be iterated only once")
            raise RuntimeError("the training loader has no batch")


def _one_pass(loader: Any, which: str) -> Iterator[Any]:
    """Yield one pass; raise RuntimeError if it ends before its length."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, EpochOrder):
        batches = batches._batches
    n = 0
    length = None
    if batches is None or type(batches) is BatchSampler:  # the length of others may be an estimate
        length = length_of(loader)
    for n, batch in enumerate(loader, 1):  # noqa: B007
        yield batch
    if n < (length or 0):
        raise RuntimeError(
            f"the {which} loader ended after {n} of {length} batches: its dataset raised StopIteration, or is smaller "
            "than its length"
        )
