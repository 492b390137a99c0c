"""Reports of ten floats a second until closing has returned: ours, trackio, wandb offline, TensorBoard, mlflow.

Run it with ``python -m benchmarks.report_rate``.
"""

from __future__ import annotations

from benchmarks._program import options, quick, status
from benchmarks._report import PEERS, measured
from benchmarks._table import print_table

BOUND = 150_000
"""Reports a second, with TensorBoard MANUAL. With AUTO there is no bound."""
ROUNDS = quick(3, 1)
REPORTS = {"det_core": quick(200_000, 100), "det_core, TensorBoard AUTO": quick(20_000, 100), "mlflow": 1_000}
PEER_REPORTS = 5_000

LOOP = """
(reports,) = N
start = time.perf_counter()
for step in range(1, reports + 1):
    report(step)
close()
print_json(reports / (time.perf_counter() - start))
"""


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    found = {
        who: max(measured(who, LOOP, REPORTS.get(who, PEER_REPORTS)) for _ in range(ROUNDS))
        for who in ("det_core", "det_core, TensorBoard AUTO", *PEERS)
    }
    ours = found["det_core"]
    rows = [(who, rate, ours / rate, ours >= BOUND if who == "det_core" else None) for who, rate in found.items()]
    print_table(
        f"reports of ten floats a second until closing has returned, best of {ROUNDS} (bound: {BOUND:,})",
        ("", "reports/s", "ours is times", "met"),
        rows,
    )
    return int(ours < BOUND)


if __name__ == "__main__":
    raise SystemExit(status(main()))
