"""What det_core costs the training of timm: images a second of step 3 of ``examples/timm_port`` against step 0.

Step 0 has nothing of det_core's; step 3 reports metrics, has each checkpoint kept and asks whether to stop, after each
epoch. Both train the same model on the same images, in one process each, in turn; the ratio of neighbours is taken, and
of those the median. What counts is the time from the end of the first epoch to the end of the last: validation and
timm's own checkpoints are in it for both, what is imported and started once is for neither.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

BOUND = 0.98
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "timm_port"
SCRIPTS = {"step 0": "step0-run.py", "step 3": "step3-checkpoints.py"}
BATCH = 32
EPOCH = re.compile(r"Epoch (\d+): ")
TIMEOUT = 1800.0


def timm_python() -> Path | None:
    """The interpreter of the venv that ``make test-timm`` makes; made if need be, but with ``--quick`` None then."""
    venv = ROOT / ".venvs" / "timm"
    if QUICK:
        return venv / "bin" / "python" if (venv / ".timm").exists() else None
    subprocess.run(["bash", ROOT / "tests" / "support" / "timm.sh", venv, sys.prefix], check=True, timeout=TIMEOUT)
    return venv / "bin" / "python"


def images_per_second(python: Path, script: str, options: list[str], folder: Path) -> float:
    """Run a script to its end, in an empty folder; what it trained on in a second, from its second epoch on."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        environment = {**os.environ, "DET_CORE_HOME": f"{work}/home", "XDG_CACHE_HOME": str(folder)}
        command = [str(python), str(EXAMPLE / script), "--batch-size", str(BATCH), *options]
        ends, said = [], []
        with subprocess.Popen(
            command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stderr is not None
            for line in job.stderr:
                now = time.perf_counter()
                said.append(line)
                if EPOCH.match(line):
                    ends.append(now)
        if job.returncode:
            raise RuntimeError(f"{script} ended with status {job.returncode}:\n{''.join(said[-20:])}")
    images = len(list(folder.glob("timm_port/digits-*/train/*/*.png"))) // BATCH * BATCH
    return images * (len(ends) - 1) / (ends[-1] - ends[0])


def main() -> int:
    """Print the table; exit status 1 if the bound is not met."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(9, 1), help="pairs of runs")
    parser.add_argument("--epochs", type=int, default=quick(9, 2), help="of each run; the first is not counted")
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--python", type=Path, help="an interpreter that has timm (default: that of make test-timm)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.epochs < 2:
        parser.error("--epochs: at least 2, as the first is not counted")
    python = arguments.python or timm_python()
    title = f"timm's {arguments.model} on digits, {arguments.epochs - 1} epochs: images a second, medians of "
    title += f"{arguments.rounds} pairs; the ratio is the median of theirs"
    columns = ["", "images/s", "times step 0", f">= {BOUND}"]
    if python is None:
        print_table(title, columns, [["timm: not installed", None, None, None]])
        return 0
    words = ["--epochs", str(arguments.epochs), "--model", arguments.model]
    found: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    with tempfile.TemporaryDirectory(prefix="timm-", dir=arguments.folder) as folder:
        for name in SCRIPTS:  # what is read from disk is then in memory for both, and the digits are there
            images_per_second(python.absolute(), SCRIPTS[name], [*words, "--epochs", "2"], Path(folder))
        for number in range(arguments.rounds):
            for name in sorted(SCRIPTS, reverse=number % 2 == 1):
                found[name].append(images_per_second(python.absolute(), SCRIPTS[name], words, Path(folder)))
    ratio = statistics.median(b / a for a, b in zip(*found.values(), strict=True))
    rows: list[tuple[object, ...]] = [("step 0", statistics.median(found["step 0"]), None, None)]
    rows.append(("step 3", statistics.median(found["step 3"]), f"{ratio:.4f}", ratio >= BOUND))
    print_table(title, columns, rows)
    return int(ratio < BOUND)


if __name__ == "__main__":
    raise SystemExit(status(main()))
