"""``allgather`` and ``gather`` of a small object at 2, 4 and 8 ranks. Bound: no slower than the best peer."""

from __future__ import annotations

from benchmarks._jobs import OURS, PEERS, measure
from benchmarks._table import print_table

SIZES = (2, 4, 8)
CALLS = {"det_core": 300, "determined": 300, "gloo": 15}
"""Per package: gloo's object collectives take tens of milliseconds at 8 ranks."""


def main() -> int:
    """Print the table; the exit status says whether the bound is met."""
    rows = []
    for size in SIZES:
        found = measure(size, "small", CALLS)
        for name in ("allgather", "gather"):
            ours, *peers = (found[package][name] * 1e6 for package in (OURS, *PEERS))
            rows.append([f"{name}, {size} ranks", ours, *peers, min(peers), ours <= min(peers)])
    columns = ["", OURS, "determined 0.38.1", "torch gloo objects", "bound: best peer", "met"]
    print_table("collectives of a small object, microseconds per call", columns, rows)
    return 0 if all(row[-1] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
