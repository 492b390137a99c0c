"""Batches of a loader as the loop draws them: loaders that fail, end early, or end apart on different ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from det_core.accelerated._base import Session


def watched(session: Session, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, and note its error."""
    try:
        yield from batches
    except Exception as e:
        session.loader_error = e
        raise


def in_groups(session: Session, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches of a loader without a length, drawn an accumulation group ahead, so that the last one is known.

    Raises:
        ValueError: On every rank, if the data of one ended before that of another, whose update would wait for it.
    """
    run = session.run
    while run.length is None:
        group = list(islice(batches, run.accumulation))
        drawn = run.batch + len(group)
        if session.several:
            everyone = session.ranks.distributed.allgather(drawn)
            if min(everyone) < max(everyone):
                raise ValueError(
                    f"the ranks differ in the length of the train loader: in epoch {run.epoch + 1} it ended after "
                    f"{min(everyone)} batches on rank {everyone.index(min(everyone))}, and has more on rank "
                    f"{everyone.index(max(everyone))}. Give all of them the same data"
                )
        if len(group) < run.accumulation:
            run.length, run.group = drawn, len(group)
        yield from group


def check_given(kind: str, given: int, length: int | None) -> None:
    """Raise RuntimeError if a loader ended early: that epoch trains less, and other ranks wait for it."""
    if not given and not length:
        raise RuntimeError(
            f"the {kind} loader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True"
        )
    if length is not None and given < length:
        raise RuntimeError(
            f"the {kind} loader gave {given} of {length} batches: its dataset has raised StopIteration, or has fewer "
            "samples than it says"
        )
