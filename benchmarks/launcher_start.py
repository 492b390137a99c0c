"""From the start of the launcher until the script's first line runs: ours, and torchrun itself.

Run it with ``python -m benchmarks.launcher_start``. Both start the same script in the same environment, one after the
other in turn, so that what else the machine does meets both. The script writes the wall clock's time as the first thing
it does; what counts is the last rank to get there.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._table import print_table

BOUND = 1.1
ROUNDS = 15
SIZES = (1, 2, 4)
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ours": [sys.executable, "-m", "det_core.launch.torch_distributed"],
}
SCRIPT = """import time; now = time.time()
import os, sys
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(repr(now))
"""


def seconds_to_first_line(launcher: str, ranks: int) -> float:
    """Start ``launcher`` once; the seconds until the last of ``ranks`` scripts ran its first line."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        words = [*LAUNCHERS[launcher], "--nproc-per-node", str(ranks), str(script), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began = time.time()
        subprocess.run(words, env=environment, check=True, timeout=120, stderr=subprocess.DEVNULL)
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def main() -> int:
    """Print the table; 1 if ours is slower than the bound at any number of ranks."""
    for launcher in LAUNCHERS:
        seconds_to_first_line(launcher, 1)  # what is read from disk is then in memory for both
    rows: list[tuple[object, ...]] = []
    for ranks in SIZES:
        took: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        for number in range(ROUNDS):
            for launcher in sorted(LAUNCHERS, reverse=number % 2 == 1):
                took[launcher].append(seconds_to_first_line(launcher, ranks))
        ratio = statistics.median(o / t for o, t in zip(took["ours"], took["torchrun"], strict=True))
        rows.append(
            (ranks, statistics.median(took["torchrun"]), statistics.median(took["ours"]), ratio, ratio <= BOUND)
        )
    print_table(
        f"start until every script's first line, seconds, medians of {ROUNDS} rounds; ratio: median of the rounds' "
        f"(bound: {BOUND})",
        ("ranks", "torchrun", "ours", "ratio", "in bound"),
        rows,
    )
    return int(not all(row[-1] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
