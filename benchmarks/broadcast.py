"""``broadcast`` of an array of 64 MB at 2, 4 and 8 ranks. Bound: at 8 ranks 3 times the best peer's MB/s."""

from __future__ import annotations

from benchmarks._jobs import OURS, PEERS, measure
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

SIZES = quick((2, 4, 8), (2,))
CALLS = {"det_core": quick(4, 1), "determined": 4, "gloo": 4}
MEGABYTES = 64
FACTOR = 3.0


def main() -> int:
    """Print the table; the exit status says whether the bound is met."""
    options(__doc__).parse_args()
    rows: list[list[object]] = []
    for size in SIZES:
        found = measure(size, "large", CALLS)
        for name in ("has it", "has read it"):
            ours, *peers = (MEGABYTES / found[package][name] for package in (OURS, *PEERS))
            bound = FACTOR * max(peers, default=0.0) if size == max(SIZES) else None
            met = "" if bound is None else ours >= bound
            rows.append([f"{size} ranks, each {name}", ours, *peers, bound, met])
    columns = ["", OURS, *PEERS.values(), "bound", "met"]
    print_table(f"broadcast of a {MEGABYTES} MB array, MB/s until every rank has it", columns, rows)
    return 0 if all(row[-1] is not False for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(status(main()))
