"""``allgather`` and ``gather`` of a small object at 2, 4 and 8 ranks. Bound: no slower than the best peer."""

from __future__ import annotations

from benchmarks._jobs import OURS, PEERS, measure
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

SIZES = quick((2, 4, 8), (2,))
CALLS = {"det_core": quick(300, 10), "determined": 300, "gloo": 15}
"""Per package: gloo's object collectives take tens of milliseconds at 8 ranks."""


def main() -> int:
    """Print the table; the exit status says whether the bound is met."""
    options(__doc__).parse_args()
    rows = []
    for size in SIZES:
        found = measure(size, "small", CALLS)
        for name in ("allgather", "gather"):
            ours, *peers = (found[package][name] * 1e6 for package in (OURS, *PEERS))
            best = min(peers, default=None)
            rows.append([f"{name}, {size} ranks", ours, *peers, best, best is None or ours <= best])
    columns = ["", OURS, *PEERS.values(), "bound: best peer", "met"]
    print_table("collectives of a small object, microseconds per call", columns, rows)
    return 0 if all(row[-1] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(status(main()))
