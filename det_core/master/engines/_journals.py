"""Handing over what the processes of an allocation left in their journals and did not ship themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from det_core._info import canonical_url
from det_core.journal import tails
from det_core.master.engines._folder import AllocationFolder


def left(folder: AllocationFolder) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Restart, rank and records as they stand in the files, in order, of every process that wrote some.

    What is given is taken for handed over when the next is asked for.
    """
    if not folder.journal.is_dir():
        return
    to = f"{canonical_url(folder.spec().get('master_url') or 'http://127.0.0.1')} {folder.path.name}"
    for tail in tails(folder.journal, to=to):
        while lines := tail.read():
            yield tail.restart, tail.rank, [line.record for line in lines]
            tail.mark(lines)
            with suppress(OSError):  # then they are handed over once more if the master dies now
                tail.save()
