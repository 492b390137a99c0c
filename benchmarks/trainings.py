"""Five trainings as users write them, run by the packages that our trainers stand in for, and by ours.

Each is one script (``_trainings``) in which only the name of the package differs; the peers run in an environment of
their own. Compared are how often each optimizer stepped, the names of the metrics, and their values: the largest
difference, relative to the largest value of its metric. What may differ is what the contracts decide; where that is
nothing, the values are equal but for rounding.
"""

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from benchmarks._bench import PEERS, Args, Bound, Table, Tables, program
from benchmarks._processes import DETERMINED, ROOT, TORCH, answer, peers, timm

FOLDER = Path(__file__).with_name("_trainings")
RIVALS = ("accelerate==1.15.0", DETERMINED, "numpy", "pytorch-accelerated==0.1.61", "tensorboard", TORCH)
TRAINERS = {"of_trainer.py": ("pytorch_accelerated", "det_core.accelerated"), "of_trial.py": ("determined", "det_core")}
TRAININGS = ("images", "gan", "finetuning", "tokens", "regression")
ROUNDING = 1e-4
DECIDED = {
    ("of_trainer.py", "images", 1): (0.2, 0, "timm's counts begin at 0, not an epoch late"),
    ("of_trainer.py", "images", 2): (0.2, 0, "timm's counts begin at 0, not an epoch late"),
    ("of_trial.py", "regression", 2): (ROUNDING, 2, "ranks agree on a stop: at most two updates later"),
}
"""Training -> allowed difference of its values, of its number of updates, and the reason."""


def options(parser: ArgumentParser) -> None:
    """Which trainings, on how many ranks."""
    parser.add_argument("trainings", nargs="*", default=TRAININGS, metavar="TRAINING", help=", ".join(TRAININGS))
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="on how many ranks (1 2)")


def measure(args: Args) -> Tables:
    ours = timm()
    if not PEERS or ours is None:
        table = Table("one training of five", ["updates"])
        for name, count in run(sys.executable, "of_trainer.py", "det_core.accelerated", "regression")[
            "updates"
        ].items():
            table.row(name, count)
        yield table
        return
    python = peers(*RIVALS)
    hook = ["bash", str(ROOT / "examples" / "timm_port" / "startup-hook.sh")]
    subprocess.run(hook, check=True, env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"})
    columns = ["updates", "as many", "same names", "apart", "decided"]
    table = Table("five trainings as users write them, beside the originals", columns)
    for script, (original, own) in TRAINERS.items():
        for training in args.trainings:
            for ranks in args.ranks:
                theirs = run(python, script, original, training, ranks)
                cells, bound = compared(theirs, run(ours, script, own, training, ranks),
                                        *DECIDED.get((script, training, ranks), (ROUNDING, 0, "")))  # fmt: skip
                table.row(f"{own}: {training}, {ranks} rank{'s' * (ranks > 1)}", *cells, bound=bound)
    yield table


def run(python: Path | str, script: str, package: str, training: str, ranks: int = 1) -> dict[str, Any]:
    """Return the record of a training."""
    if ranks > 1:
        # torch's own launcher, as it belongs to neither of the packages.
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    else:
        launcher = []
    with tempfile.TemporaryDirectory() as home:  # determined copies its working directory there
        # determined wraps models in DDP by USE_TORCH_DISTRIBUTED alone, also where it is given a process group.
        env = {"HOME": home, **({"USE_TORCH_DISTRIBUTED": "1", "ACCELERATE_USE_CPU": "true"} if ranks > 1 else {})}
        found: dict[str, Any] = answer(FOLDER / script, package, training, python=python, launcher=launcher, env=env)
    return found


def compared(
    theirs: dict[str, Any], ours: dict[str, Any], allowed: float, late: int, why: str
) -> tuple[list[Any], Bound]:
    """Return the cells of a training: updates, whether they and the names are equal, difference of the values."""
    peer = theirs["metrics"]
    own = ours["metrics"]
    differences = [0.0]
    for name in peer.keys() & own.keys():
        scale = max(map(abs, peer[name])) or 1.0
        # Ranks that may stop later have more values than the peer.
        differences += [abs(a - b) / scale for a, b in zip(peer[name], own[name], strict=not late)]
    updates = all(0 <= ours["updates"][name] - count <= late for name, count in theirs["updates"].items())
    names = peer.keys() == own.keys()
    apart = max(differences)
    counts = ", ".join(f"{name} {count}" for name, count in ours["updates"].items())
    bound = Bound(f"same, <= {allowed:g}", updates and names and apart <= allowed)
    return [counts, updates, names, apart, why], bound


if __name__ == "__main__":
    program(measure, __doc__, more=options)
