"""Batches of a loader as the loop draws them: loaders that fail, end early, or end apart on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from det_core._training.loader_errors import LoaderBatches, forget_workers
from det_core.accelerated._base import Session
from det_core.accelerated._data import begin


def training_batches(session: Session, loader: Any) -> Iterator[Any]:
    """Return the batches of the epoch under way, from ``run.batch`` on."""
    epoch = session.run.epoch
    first = session.run.batch

    def open_from(drawn: int) -> Iterator[Any]:
        begin(loader, epoch, first + drawn)
        return iter(loader)

    return _steady(session, loader, open_from)


def evaluation_batches(session: Session, loader: Any) -> Iterator[Any]:
    """Return the batches of an evaluation."""
    return _steady(session, loader, lambda drawn: islice(loader, drawn, None))


def _steady(session: Session, loader: Any, open_from: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """Return batches whose errors are noted; on several ranks a stop does not end them."""

    def note(error: Exception) -> None:
        session.loader_error = error

    def reopen_from(drawn: int) -> Iterator[Any]:
        from det_core.core import random_state, set_random_state

        forget_workers(loader.iterated if getattr(loader, "_is_det_core", False) else loader)
        state = random_state()
        batches = open_from(drawn)
        set_random_state(state)  # an iterator that is made again draws what it has drawn before
        return batches

    preempt = session.ranks.preempt if session.has_peers else None
    return LoaderBatches(open_from, note, preempt=preempt, reopen_from=reopen_from)


def in_groups(session: Session, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches of a loader without a length, drawn an accumulation group ahead, so that the last one is known.

    Raises:
        ValueError: On every rank, if the data of one ended before that of another, whose update would wait for it.
    """
    run = session.run
    while run.length is None:
        group = list(islice(batches, run.accumulation))
        drawn = run.batch + len(group)
        if session.has_peers:
            everyone = session.ranks.distributed.allgather(drawn)
            if min(everyone) < max(everyone):
                raise ValueError(
                    f"the ranks differ in the length of the train loader: in epoch {run.epoch + 1} it ended after "
                    f"{min(everyone)} batches on rank {everyone.index(min(everyone))}, and has more on rank "
                    f"{everyone.index(max(everyone))}. Give all of them the same data"
                )
        if len(group) < run.accumulation:
            run.length = drawn
            run.group = len(group)
        yield from group


def check_batch_count(kind: str, count: int, length: int | None) -> None:
    """Raise RuntimeError if a loader ended early: that epoch trains less, and other ranks wait for it."""
    if not count and not length:
        raise RuntimeError(
            f"the {kind} loader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True"
        )
    if length is not None and count < length:
        raise RuntimeError(
            f"the {kind} loader gave {count} of {length} batches: its dataset has raised StopIteration, or has fewer "
            "samples than it says"
        )
