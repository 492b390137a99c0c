"""What one report of ten floats costs on the caller's thread: ours, trackio, wandb offline, TensorBoard, mlflow.

Run it with ``python -m benchmarks.report_cost``.
"""

from __future__ import annotations

from benchmarks._program import options, quick, status
from benchmarks._report import PEERS, measured
from benchmarks._table import print_table

MEDIAN_US, P99_US, CHEAPER = 3.5, 15.0, 5.0
"""The bounds: microseconds at the median and at the 99th percentile, and how much cheaper than the best peer."""
KEY_US = 5.0
"""The bound for a report of many keys: microseconds a key."""
KEYS = quick(100_000, 100)
ROUNDS = quick(5, 1)
PASSES = quick(3, 1)
REPORTS = {"det_core": quick(20_000, 100)}
PEER_REPORTS = 500
"""Reports in a round; peers that queue could not take more without blocking."""

LOOP = """
rounds, reports = N
clock = time.perf_counter_ns
found, step = [], 0
for _ in range(rounds):
    took = []
    for _ in range(reports):
        step += 1
        start = clock()
        report(step)
        took.append(clock() - start)
    took.sort()
    found.append((took[reports // 2] / 1e3, took[reports * 99 // 100] / 1e3))
    time.sleep(0.2)
close()
print_json([min(column) for column in zip(*found)])
"""

WIDE = """
(keys,) = N
found = []
for step, values in enumerate(({f"key{i}": float(i) for i in range(keys)}, {f"key{i}": 1 for i in range(keys)}), 1):
    start = time.perf_counter_ns()
    train.report_metrics("wide", step, values)
    found.append((time.perf_counter_ns() - start) / 1e3 / keys)
close()
print_json(max(found))
"""


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    found = {who: [float("inf")] * 2 for who in ("det_core", *PEERS)}
    for _ in range(PASSES):  # in turn, so that a busy moment of the machine does not hit one of them alone
        for who, best in found.items():
            took = measured(who, LOOP, ROUNDS, REPORTS.get(who, PEER_REPORTS))
            found[who] = [min(pair) for pair in zip(best, took, strict=True)]
    median, p99 = found["det_core"]
    best = min((found[peer][0] for peer in PEERS), default=float("inf"))
    met = median <= MEDIAN_US and p99 <= P99_US and CHEAPER * median <= best
    rows = [
        (who, *found[who], found[who][0] / median, met if who == "det_core" else None) for who in ("det_core", *PEERS)
    ]
    print_table(
        f"one report of ten floats on the caller's thread, in µs, each the best of {PASSES * ROUNDS} rounds "
        f"(bound: {MEDIAN_US:g} and {P99_US:g}, {CHEAPER:g} times cheaper than the best peer)",
        ("", "median", "p99", "times ours", "met"),
        rows,
    )
    wide = min(measured("det_core", WIDE, KEYS) for _ in range(PASSES))
    print_table(
        f"one report of {KEYS:,} keys, in µs a key, the slower of the first and the next (bound: {KEY_US:g})",
        ("", "µs a key", "met"),
        [("det_core", wide, wide <= KEY_US)],
    )
    return int(not met) + int(wide > KEY_US)


if __name__ == "__main__":
    raise SystemExit(status(main()))
