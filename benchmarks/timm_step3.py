"""Cost of det_core to the training of timm: images a second of step 3 of ``examples/timm_port`` against step 0.

Step 0 has nothing of det_core's; step 3 reports metrics, has each checkpoint kept and asks whether to stop, after each
epoch. Both train the same model on the same images, in one process each, in turn; the ratio of neighbours is taken, and
of those the median. What counts is the time from the end of the first epoch to the end of the last: validation and
timm's own checkpoints are in it for both, what is imported and started once is for neither.
"""

import functools
import re
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from benchmarks._bench import Args, Table, Tables, at_least, program, quick
from benchmarks._processes import ROOT, environment, timm
from benchmarks._turns import Figures, alternate, median, ratio

BOUND = 0.98
BATCH = 32
MODEL = "test_resnet"
EXAMPLE = ROOT / "examples" / "timm_port"
SCRIPTS = {"step 0": "step0-run.py", "step 3": "step3-checkpoints.py"}
EPOCH = re.compile(r"Epoch (\d+): ")


def options(parser: ArgumentParser) -> None:
    """Add the options of the training and its interpreter."""
    text = "of each run, at least 2; the first is not counted"
    parser.add_argument("--epochs", type=int, default=quick(9, 2), choices=range(2, 1000), metavar="N", help=text)
    parser.add_argument("--python", type=Path, help="an interpreter that has timm (default: that of make test-timm)")


def measure(args: Args) -> Tables:
    python = args.python or timm()
    title = f"timm's {MODEL} on digits, {args.epochs - 1} epochs: images a second, medians of {args.rounds} pairs"
    table = Table(title, ["images/s", "times step 0"])
    if python is None:
        table.row("timm: not installed")
        yield table
        return
    with tempfile.TemporaryDirectory(prefix="timm-", dir=args.folder) as folder:
        # Not resolved: behind the link is an interpreter without the environment's packages.
        command = [str(python.absolute()), "--batch-size", str(BATCH), "--model", MODEL, "--epochs"]
        run = functools.partial(images_per_second, command, Path(folder))
        for script in SCRIPTS.values():  # what is read from disk is then in memory for both, and the digits are there
            run(2, script)
        found = alternate({name: functools.partial(run, args.epochs, script) for name, script in SCRIPTS.items()},
                          args.rounds)  # fmt: skip
    times = ratio(found["step 3"], found["step 0"], "rate")
    table.row("step 0", median(found["step 0"], "rate"))
    table.row("step 3", median(found["step 3"], "rate"), f"{times:.4f}", bound=at_least(times, BOUND))
    yield table


def images_per_second(command: list[str], folder: Path, epochs: int, script: str) -> Figures:
    """Run a script to its end, in an empty folder; what it trained on in a second, from its second epoch on."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        # One cache for all runs, so that the digits are written in the first, which is not counted.
        env = environment(Path(work, "home")) | {"XDG_CACHE_HOME": str(folder)}
        words = [command[0], str(EXAMPLE / script), *command[1:], str(epochs)]
        ends = []
        said = []
        with subprocess.Popen(
            words, cwd=work, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stderr is not None
            for line in job.stderr:
                said.append(line)
                if EPOCH.match(line):
                    ends.append(time.perf_counter())
        if job.returncode:
            raise RuntimeError(f"{script} ended with status {job.returncode}:\n{''.join(said[-20:])}")
    # In whole batches: timm's loader drops the last one of a training if it is not full.
    images = len(list(folder.glob("timm_port/digits-*/train/*/*.png"))) // BATCH * BATCH
    return {"rate": images * (len(ends) - 1) / (ends[-1] - ends[0])}


if __name__ == "__main__":
    program(measure, __doc__, rounds=9, folder=True, more=options)
