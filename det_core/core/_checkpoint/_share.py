"""Which files ranks want, and how they share the work: pure decisions."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from det_core.storage import Manifest, Selector

FILE_COST = 64 << 10
"""What opening a file costs, in bytes that could be copied meanwhile."""
Votes = Sequence[set[str] | None]
"""By rank: the resources that it wants; None: all."""


def vote(manifest: Manifest, selector: Selector | None) -> set[str] | None:
    """The resources that a rank wants; None: all."""
    return None if selector is None else {path for path in manifest.resources if selector(path)}


def union(votes: Iterable[set[str] | None]) -> set[str] | None:
    """What any rank wants; None: all."""
    wanted: set[str] = set()
    for one in votes:
        if one is None:
            return None
        wanted |= one
    return wanted


def weighed(sizes: Mapping[str, int], ranks: Iterable[int]) -> dict[int, list[str]]:
    """Split files among ranks, so that these have about the same number of bytes and of files."""
    loads = [(0, rank) for rank in ranks]
    shares: dict[int, list[str]] = {rank: [] for _, rank in loads}
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(path)
        heapq.heappush(loads, (load + sizes[path] + FILE_COST, rank))
    return shares
