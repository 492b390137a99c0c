"""Time of ``det-core --help``, of ``runs list`` of 2,000 runs, and of ``runs show`` of a run with 2,000 checkpoints."""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._bench import OURS, Args, Table, Tables, at_most, program, quick
from benchmarks._processes import HANGS, environment, trees
from benchmarks._turns import Figures, alternate, median, ratio

RUNS = quick(2000, 5)
CHECKPOINTS = quick(2000, 5)
SHOW_SECONDS = 1.0
SCREEN_LINES = 60
ANOTHER_TREE = 1.1
"""Bound of the commands without a bound of their own, as a ratio to the tree of ``--against``."""
FILL = """
import sys
from det_core import core
for number in range(int(sys.argv[1])):
    with core.init(name=f"run-{number}") as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
with core.init(name="many") as context:
    for step in range(int(sys.argv[2])):
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            path.joinpath("weights").write_bytes(b"x")
"""
COMMANDS = {"--help": ["--help"], "runs list": ["runs", "list"], "runs show": ["runs", "show", "latest"]}


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        home = Path(folder)
        fill = [sys.executable, "-c", FILL, str(RUNS), str(CHECKPOINTS)]
        subprocess.run(fill, env=environment(home), cwd=home, check=True, capture_output=True)
        contenders = {
            name: functools.partial(seconds_of_commands, home, tree) for name, tree in trees(args.against).items()
        }
        for contender in contenders.values():
            contender()  # fills the caches of files and bytecode
        figures = alternate(contenders, args.rounds)
    title = f"seconds of commands, {RUNS:,} runs, one with {CHECKPOINTS:,} checkpoints, median of {args.rounds}"
    table = Table(title, ["s", "lines", "ratio"])
    for name, rounds in figures.items():
        for command in COMMANDS:
            took = median(rounds, command)
            lines = int(median(rounds, f"{command}, lines"))
            times = ratio(figures[OURS], rounds, command)
            bound = None
            if name != OURS:
                bound = at_most(times, ANOTHER_TREE)
            elif command == "runs show":
                bound = at_most(took, SHOW_SECONDS) & at_most(lines, SCREEN_LINES)
            table.row(f"{command} of {name}", took, lines, times, bound=bound)
    yield table


def seconds_of_commands(home: Path, tree: Path) -> Figures:
    """Run each command once; return the seconds that it took and the lines that it printed."""
    figures = {}
    for name, arguments in COMMANDS.items():
        began = time.perf_counter()
        command = [sys.executable, "-m", "det_core.cli", *arguments]
        printed = subprocess.run(
            command, env=environment(home, tree), cwd=home, check=True, capture_output=True, timeout=HANGS
        )
        figures[name] = time.perf_counter() - began
        figures[f"{name}, lines"] = float(printed.stdout.count(b"\n"))
    return figures


if __name__ == "__main__":
    program(measure, __doc__, rounds=5, against=True)
