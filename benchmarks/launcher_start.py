"""From the start of a launcher until the script's first line runs: ours, the framework's own, and no launcher at all.

All three run from the frameworks' environment and start the same script, one after the other in turn, so that what else
the machine does meets all. The script writes the wall clock's time as the first thing it does; what counts is the last
rank to get there. The bound is on what ours takes beyond ``python script.py``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._peers import ROOT, frameworks_python
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

BOUND = 0.2
"""Seconds, for two ranks."""
SIZES = quick((2, 8), (2,))
TIMEOUT = 300.0
ALONE = ["python"]
PAIRS = {
    "torchrun": (
        ["torchrun", "--nproc-per-node", "{ranks}"],
        ["python", "-m", "det_core.launch.torch_distributed", "--nproc-per-node", "{ranks}"],
    ),
    "horovodrun": (
        ["horovodrun", "--gloo", "-np", "{ranks}", "python"],
        ["python", "-m", "det_core.launch.horovod", "-np", "{ranks}"],
    ),
    "deepspeed": (
        ["deepspeed", "--no_local_rank", "--num_gpus", "{ranks}"],
        ["python", "-m", "det_core.launch.deepspeed", "--num_gpus", "{ranks}"],
    ),
}
"""Commands of the frameworks' environment: theirs, ours."""
SCRIPT = """import time; now = time.time()
import os, sys
open(os.path.join(sys.argv[1], os.environ.get("RANK") or os.environ.get("HOROVOD_RANK", "0")), "w").write(repr(now))
"""


def seconds_to_first_line(launcher: list[str], ranks: int, binaries: Path) -> float:
    """Start ``launcher`` once; the seconds until the last of ``ranks`` scripts ran its first line.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        words = [word.format(ranks=ranks) for word in launcher]
        words = [str(binaries / words[0]), *words[1:], str(script), folder]
        path = f"{binaries}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment["PYTHONPATH"] = str(ROOT)
        began = time.time()
        done = subprocess.run(words, env=environment, timeout=TIMEOUT, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"{words} ended with status {done.returncode}: {done.stderr[-2000:]}")
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(ranks)) - began


def measured(name: str, ranks: int, rounds: int, binaries: Path) -> tuple[object, ...]:
    """The row of a pair: medians of the times, and of what ours took beyond python in each round."""
    took: list[list[float]] = [[], [], []]
    for number in range(rounds):
        for which in (0, 1, 2) if number % 2 else (2, 1, 0):
            launcher, count = (ALONE, 1) if which == 0 else (PAIRS[name][which - 1], ranks)
            took[which].append(seconds_to_first_line(launcher, count, binaries))
    beyond = statistics.median(ours - alone for alone, _, ours in zip(*took, strict=True))
    bound = BOUND if ranks == 2 else None
    return (f"{name}, {ranks} ranks", *map(statistics.median, took), beyond, bound, ranks != 2 or beyond <= BOUND)


def main() -> int:
    """Print the table; 1 if any of ours is slower than the bound for two ranks."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(15, 1), help="of which the medians count (default: 15)")
    parser.add_argument("--only", choices=list(PAIRS), help="leave the others out")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="how many (default: 2 8)")
    args = parser.parse_args()
    found = frameworks_python()
    binaries = (found or Path(sys.executable)).parent
    pairs = PAIRS if found else {"torchrun": PAIRS["torchrun"]}
    rows = []
    for name in pairs:
        if args.only in (None, name):
            for launcher in PAIRS[name]:
                seconds_to_first_line(launcher, 1, binaries)  # what is read from disk is then in memory for both
            rows += [measured(name, ranks, args.rounds, binaries) for ranks in args.ranks]
    print_table(
        f"start until every script's first line, s, medians of {args.rounds} rounds",
        ("launcher", "python alone", "its own", "ours", "beyond python", "bound", "met"),
        rows,
    )
    return int(not all(row[-1] for row in rows))


if __name__ == "__main__":
    raise SystemExit(status(main()))
