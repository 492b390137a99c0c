"""How long an import takes beyond a bare interpreter: ``from det_core import core`` beside what its peers import."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

BOUND_MS = 40.0
ROUNDS = quick(16, 1)
PEERS = {
    "determined==0.38.1": "from determined import core",
    "mlflow-skinny": "import mlflow",
    "wandb": "import wandb",
    "trackio": "import trackio",
}


def seconds(python: Path, code: str) -> float:
    """Wall time of one interpreter that runs ``code`` from its bytecode caches, whatever PYTHON... says outside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    begin = time.perf_counter()
    subprocess.run([python, "-c", code], env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(programs: dict[str, tuple[Path, str]]) -> dict[str, float]:
    """Milliseconds that each program needs beyond ``pass``: the difference of the medians of both.

    What is compared is run in turn, one first and then the other, so that a change of the machine's load and what a
    process leaves to the next meet both alike; the first round fills the caches and does not count.
    """
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for turn in range(ROUNDS + 1):
        for name, (python, code) in programs.items():
            order = (code, "pass") if turn % 2 else ("pass", code)
            found = {each: 1000 * seconds(python, each) for each in order}
            if turn:
                took[name].append((found[code], found["pass"]))
    return {
        name: statistics.median(code for code, _ in pairs) - statistics.median(bare for _, bare in pairs)
        for name, pairs in took.items()
    }


def main() -> int:
    """Print the table; 1 if our bound is not met."""
    options(__doc__).parse_args()
    # A part is loaded when its name is first used, so the second line is what a script has paid once it calls init().
    uses = ("from det_core import core", "from det_core import core; core.init")
    programs = {use: (Path(sys.executable), use) for use in uses}
    if not QUICK:
        peers = peers_python(*PEERS)
        programs.update({f"{code} ({name})": (peers, code) for name, code in PEERS.items()})
    found = measure(programs)
    ours = next(iter(found.values()))
    rows = [
        [name, ms, ms / ours, BOUND_MS if ms is ours else None, ms <= BOUND_MS if ms is ours else None]
        for name, ms in found.items()
    ]
    title = f"Import, ms beyond a bare interpreter, median of {ROUNDS}"
    print_table(title, ["what", "ms", "times ours", "bound", "met"], rows)
    return 0 if ours <= BOUND_MS else 1


if __name__ == "__main__":
    raise SystemExit(status(main()))
