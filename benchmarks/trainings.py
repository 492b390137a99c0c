"""Five trainings as users write them, run by the packages that our trainers stand in for, and by ours.

Each is one script (``_trainings``) in which only the name of the package differs; the peers run in an environment of
their own. Compared are how often each optimizer stepped, the names of the metrics, and their values: the largest
difference, relative to the largest value of its metric. What may differ is what the contracts decide; where that is
nothing, the values are equal but for rounding.
Run it with ``python -m benchmarks.trainings [TRAINING ...]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, status
from benchmarks._table import print_table
from benchmarks.timm_step3 import timm_python

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).with_name("_trainings")
PEERS = (
    "accelerate==1.15.0", "determined==0.38.1", "numpy", "pytorch-accelerated==0.1.61", "tensorboard", "torch==2.13.0",
)  # fmt: skip
TRAINERS = {"of_trainer.py": ("pytorch_accelerated", "det_core.accelerated"), "of_trial.py": ("determined", "det_core")}
TRAININGS = ("images", "gan", "finetuning", "tokens", "regression")
ROUNDING = 1e-4
DECIDED = {
    ("of_trainer.py", "images", 1): (0.2, 0, "timm's counts begin at 0, not an epoch late"),
    ("of_trainer.py", "images", 2): (0.2, 0, "timm's counts begin at 0, not an epoch late"),
    ("of_trial.py", "regression", 2): (ROUNDING, 2, "ranks agree on a stop: at most two updates later"),
}
"""How far the values of a training may be apart by what was decided, how many updates later it may end, and why."""


def run(python: Path, script: str, package: str, training: str, ranks: int) -> dict[str, Any]:
    """What a training tells of itself."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")  # which determined copies to HOME, so neither lies in the other
        work.mkdir()
        environment = {
            **os.environ, "HOME": folder, "DET_CORE_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1",
            **({"USE_TORCH_DISTRIBUTED": "1", "ACCELERATE_USE_CPU": "true"} if ranks > 1 else {}),
        }  # fmt: skip
        command = [str(python), *launcher, str(FOLDER / script), package, training]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=1800)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode or len(lines) != 1:
        said = done.stdout[-1000:] + done.stderr[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def compared(theirs: dict[str, Any], ours: dict[str, Any], allowed: float, late: int, why: str) -> list[Any]:
    """The cells of a training: updates, whether they and the names are the same, how far the values are apart."""
    peer, own = theirs["metrics"], ours["metrics"]
    differences = [0.0]
    for name in peer.keys() & own.keys():
        scale = max(map(abs, peer[name])) or 1.0
        differences += [abs(a - b) / scale for a, b in zip(peer[name], own[name], strict=not late)]
    updates = all(0 <= ours["updates"][name] - count <= late for name, count in theirs["updates"].items())
    names, apart = peer.keys() == own.keys(), max(differences)
    counts = ", ".join(f"{name} {count}" for name, count in ours["updates"].items())
    return [counts, updates, names, apart, allowed, updates and names and apart <= allowed, why]


def main() -> int:
    """Print the table; how many trainings differ by more than was decided."""
    parser = options(__doc__)
    parser.add_argument("trainings", nargs="*", default=TRAININGS, metavar="TRAINING", help=", ".join(TRAININGS))
    parser.add_argument("--trainer", nargs="*", default=TRAINERS, choices=TRAINERS, help="by which script (both)")
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="on how many ranks (1 2)")
    given = parser.parse_args()
    ours = timm_python()
    if QUICK or ours is None:
        found = run(Path(sys.executable), "of_trainer.py", "det_core.accelerated", "regression", 1)
        print_table("One training of five", ["optimizer", "updates"], list(found["updates"].items()))
        return 0
    peers = peers_python(*PEERS)
    hook = ["bash", str(ROOT / "examples" / "timm_port" / "startup-hook.sh")]
    subprocess.run(hook, check=True, env={**os.environ, "PATH": f"{peers.parent}:{os.environ['PATH']}"})
    rows: list[list[Any]] = []
    for script in given.trainer:
        original, own = TRAINERS[script]
        for training in given.trainings:
            for ranks in given.ranks:
                theirs, us = run(peers, script, original, training, ranks), run(ours, script, own, training, ranks)
                name = f"{own}: {training}, {ranks} rank{'s' * (ranks > 1)}"
                print(name, "ran", file=sys.stderr)
                rows.append([name, *compared(theirs, us, *DECIDED.get((script, training, ranks), (ROUNDING, 0, "")))])
    columns = ["training", "updates", "as many", "same names", "apart", "allowed", "met", "decided"]
    print_table("Five trainings as users write them, beside the originals", columns, rows)
    return sum(not row[6] for row in rows)


if __name__ == "__main__":
    raise SystemExit(status(main()))
