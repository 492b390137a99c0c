"""The loaders of one fit: built for one rank and one position; and what a number of batches is as a place in them."""

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
class Dealing:
    """How batches are dealt out to ranks in one fit, so that a number of trained batches is a place in the data.

    Attributes:
        pass_batches: batches of a pass over the dataset.
        batch_size: records in each; None: it is up to a batch_sampler of the user's.
        skip: batches of each rank that were passed over.
        origin: how many were trained by then.
    """

    pass_batches: int
    batch_size: int | None
    skip: int
    origin: int


class Loaders:
    """The loaders of one fit.

    Args:
        rank: whose share of the batches to take; left out: that of this rank among all.
        size: how many share them.
        each: how many batches of the training loader are trained as one.

    Attributes:
        dealing: how batches are dealt out; None: nothing is built, or a loader of the user's.
        lengths: records and batches of loaders of ours, which must be the same on every rank.
        error: the last error that a loader has raised; None: none has.
    """

    def __init__(
        self, trial: Trial, context: TrialContext, *, rank: int | None = None, size: int | None = None, each: int = 1
    ) -> None:
        self._trial, self._context, self._each = trial, context, each
        self._rank = context.distributed.rank if rank is None else rank
        self._size = context.distributed.size if size is None else size
        self._validation: Any = None
        self._resumable: core.ResumableLoader[Any] | None = None
        self.dealing: Dealing | None = None
        self.lengths: dict[str, int | None] = {}
        self.error: Exception | None = None

    def build(
        self, position: Position, *, full_validation: bool, state: Mapping[str, Any] | None = None
    ) -> tuple[Iterator[Any], int | None]:
        """Build both loaders; the training batches from ``position`` on, and how many of them are a pass of a rank.

        Args:
            position: number of trained batches, and seed of the order.
            full_validation: whether each rank is given the whole validation set.
            state: what :meth:`state` returned at the checkpoint, for a DataLoader of the user's.
        """
        training = self._trial.build_training_data_loader()
        self._check(training, "build_training_data_loader")
        training = _unrepeated(training)
        if isinstance(training, DataLoader):
            slot = None if training.batches_by_user else training.batch_size
            whole = self._note("training", training)
            skip = self._start(position, whole, slot, length_of(training.dataset))
            self.dealing = None if whole is None else Dealing(whole, slot, skip, position.batches)
            batches, length = self._training(training, position.seed, skip)
        else:
            batches, length = self._foreign(training, position, state), length_of(training)
        validation = self._trial.build_validation_data_loader()
        self._check(validation, "build_validation_data_loader")
        validation = _unrepeated(validation)
        if isinstance(validation, DataLoader):
            self._note("validation", validation)
            size, rank = (1, 0) if full_validation else (self._size, self._rank)
            validation = validation.validation(position.seed, rank=rank, size=size)
        self._validation = validation
        return batches, length

    def _training(self, data: DataLoader, seed: int, skip: int) -> tuple[Iterator[Any], int | None]:
        """Return this rank's endless batches after ``skip``, and how many of them are a pass."""

        def loader(drawn: int) -> Any:
            return data.training(seed, rank=self._rank, size=self._size, skip=skip + drawn)

        return self._steady(lambda drawn: _unending(iter(loader(drawn)))), length_of(loader(0))

    def _foreign(self, loader: Any, position: Position, state: Mapping[str, Any] | None) -> Iterator[Any]:
        """Return the endless batches of a loader of the user's, of a torch DataLoader from its position on."""
        self._resumable = None
        reason = "its position is in no checkpoint"
        try:
            resumable = core.resumable(loader) if isinstance(loader, data.DataLoader) else loader
            if isinstance(resumable, core.ResumableLoader):
                self._resumable = resumable
                if state is not None:
                    resumable.load_state_dict(state)
        except ValueError as e:
            state = None
            reason = str(e)
        if position.batches and state is None:
            logger.warning("a loader of your own starts from its beginning: this resume is not exact: %s", reason)
        if self._resumable is None:
            return self._steady(lambda _drawn: _endless(loader), loader)

        def open_from(drawn: int) -> Iterator[Any]:
            if drawn:  # after an error of this loader
                resumable.load_state_dict(resumable.state_dict())
            if drawn or state is not None:  # begun now, before what comes next draws random numbers
                return chain(iter(resumable), _endless(resumable))
            return _endless(resumable)

        return self._steady(open_from, resumable.loader)

    def state(self) -> dict[str, Any] | None:
        """Return the position of this rank in a torch DataLoader of the user's; None of any other loader."""
        return None if self._resumable is None else self._resumable.state_dict()

    def validation(self) -> tuple[Iterator[Any], int | None]:
        """A new pass over this rank's share of the validation set, and how many batches that is."""
        loader = self._validation
        one_pass = self._steady(lambda drawn: islice(_one_pass(loader, "validation"), drawn, None), loader)
        return one_pass, length_of(loader)

    def _steady(self, open_from: Callable[[int], Iterator[Any]], loader: Any = None) -> Iterator[Any]:
        """Return batches whose errors are noted; on several ranks a stop does not end them."""

        def note(error: Exception) -> None:
            self.error = error

        def reopen_from(drawn: int) -> Iterator[Any]:
            forget_workers(loader)
            return open_from(drawn)

        preempt = self._context._core.preempt if self._context.distributed.size > 1 else None
        return LoaderBatches(open_from, note, preempt=preempt, reopen_from=reopen_from)

    def whole_validation(self) -> Any:
        """The torch loader of the whole validation set."""
        return self._validation

    def position(self, start: Position, batches_trained: int) -> Position:
        """Where the data is after so many batches of this rank."""
        dealing = self.dealing
        if dealing is None:
            return Position(start.seed, batches_trained, 0, 0, None, self._size)
        dealt = ((batches_trained - dealing.origin) * self._each + dealing.skip) * self._size
        pass_, batch = divmod(dealt, dealing.pass_batches)
        slot = dealing.batch_size
        records, together = (0, None) if slot is None else (batch * slot, slot * self._each * self._size)
        return Position(start.seed, batches_trained, pass_, records, together, self._size)

    def _start(self, position: Position, pass_batches: int | None, slot: int | None, dataset: int | None) -> int:
        """How many batches of this rank to pass over: those that the ranks of before have dealt out, in records."""
        each = self._each
        if slot is None or position.global_batch_size is None or pass_batches is None:
            if position.size != self._size and position.batches:
                logger.warning(
                    "%d rank(s) go on where %d were: with a batch_sampler of your own, or a checkpoint of another "
                    "kind, this resume is not exact", self._size, position.size,
                )  # fmt: skip
            return position.batches * each
        dealt = position.pass_ * pass_batches + math.ceil(position.records / slot)
        skip = math.ceil(dealt / (self._size * each)) * each
        together = slot * each * self._size
        if (position.size, position.global_batch_size) != (self._size, together) and (
            position.global_batch_size != together or dataset is None or dataset % together
        ):
            pass_, batch = divmod(skip * self._size, pass_batches)
            logger.warning(
                "%d rank(s) with %d records a step go on where %d rank(s) with %d were: the training goes on at record "
                "%d of pass %d, and was at record %d of pass %d",
                self._size, together, position.size, position.global_batch_size, batch * slot, pass_,
                position.records, position.pass_,
            )  # fmt: skip
        return skip

    def _note(self, which: str, loader: DataLoader) -> int | None:
        batches = length_of(loader)
        self.lengths |= {f"records of {which} data": length_of(loader.dataset), f"batches of {which} data": batches}
        return batches

    def _check(self, loader: Any, method: str) -> None:
        if not isinstance(loader, DataLoader) and not self._context._any_loader:
            raise InvalidExperimentException(
                f"{method}() returned a {type(loader).__name__}: expected a det_core.pytorch.DataLoader; to use any "
                f"other, call {self._context._any_loader_call} in __init__()"
            )


def _unending(batches: Iterator[Any]) -> Iterator[Any]:
    """Those of a loader of ours, which has no end."""
    yield from batches
    raise RuntimeError("the training loader ended: its dataset raised StopIteration")


def _unrepeated(loader: Any) -> Any:
    """What DeepSpeed's RepeatingLoader repeats: that has a length and an end, and passes are repeated here."""
    return loader.loader if type(loader).__name__ == "RepeatingLoader" and hasattr(loader, "loader") else loader


def _endless(loader: Any) -> Iterator[Any]:
    """Pass after pass.

    Raises:
        RuntimeError: a pass without a batch, or with fewer than its length.
    """
    for number in count(1):
        batch = None
        for batch in _one_pass(loader, "training"):
            yield batch
        if batch is None:
            spent = f" in pass {number}: it can be gone through once only, as a generator can" if number > 1 else ""
            raise RuntimeError(f"the training loader gives no batch{spent}")


def _one_pass(loader: Any, which: str) -> Iterator[Any]:
    """One pass; RuntimeError, if it ends before its length, unless that is what a batch sampler of the user's says."""
    batches = getattr(loader, "batch_sampler", None)
    batches = batches._batches if isinstance(batches, EpochOrder) else batches
    n, length = 0, length_of(loader) if batches is None or type(batches) is BatchSampler else None
    for n, batch in enumerate(loader, 1):  # noqa: B007
        yield batch
    if n < (length or 0):
        raise RuntimeError(
            f"the {which} loader gave {n} of its {length} batches: its dataset raised StopIteration, or has less than "
            "it says"
        )
