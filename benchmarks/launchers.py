"""From the start of a launcher until every script's first line runs: ours, the framework's own, and none at all.

All run the same script from the frameworks' environment. It writes the wall clock's time as the first thing it does;
what counts is the last rank to get there, and the bound is on what ours takes beyond ``python script.py`` in the same
round.
"""

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._bench import OURS, Args, Table, Tables, at_most, program, quick
from benchmarks._processes import HANGS, ROOT, environment, frameworks, trees
from benchmarks._turns import Figures, alternate, median

BOUND = 0.2  # seconds, for two ranks
SIZES = quick((2, 8), (2,))
# Without --no_local_rank, DeepSpeed's puts ``--local_rank=N`` before the script's own words.
OWN = {
    "torch_distributed": ["torchrun", "--nproc-per-node"],
    "horovod": ["horovodrun", "--gloo", "-np"],
    "deepspeed": ["deepspeed", "--no_local_rank", "--num_gpus"],
}
"""The command of each framework's own launcher, up to the number of ranks."""
SCRIPT = """import time; now = time.time()
import os, sys
open(os.path.join(sys.argv[1], os.environ.get("RANK") or os.environ.get("HOROVOD_RANK", "0")), "w").write(repr(now))
"""


def measure(args: Args) -> Tables:
    found = frameworks()
    binaries = (found or Path(sys.executable)).parent
    table = Table(f"start until every script's first line, s, medians of {args.rounds}", ["s", "beyond python"])
    for framework in OWN if found else ["torch_distributed"]:
        for ranks in SIZES:
            contenders = {"python alone": functools.partial(run, ["python"], 1, binaries, ROOT)}
            for name, (command, tree) in launchers(args, framework, ranks).items():
                contenders[name] = functools.partial(run, command, ranks, binaries, tree)
            for contender in contenders.values():
                contender()  # what is read from disk is then in memory for all
            starts = alternate(contenders, args.rounds)
            for name, each in starts.items():
                pairs = zip(each, starts["python alone"], strict=True)
                beyond = statistics.median(one["s"] - alone["s"] for one, alone in pairs)
                if name == OURS and ranks == 2:
                    bound = at_most(beyond, BOUND)
                else:
                    bound = None
                table.row(f"{framework}, {ranks} ranks: {name}", median(each, "s"), beyond, bound=bound)
    yield table


def launchers(args: Args, framework: str, ranks: int) -> dict[str, tuple[list[str], Path]]:
    """Return the command and the tree of each contender."""
    # horovodrun runs any program, the other two a script of Python.
    own = [*OWN[framework], str(ranks), *(["python"] if framework == "horovod" else [])]
    command = ["python", "-m", f"det_core.launch.{framework}", OWN[framework][-1], str(ranks)]
    return {**{name: (command, tree) for name, tree in trees(args.against).items()}, own[0]: (own, ROOT)}


def run(launcher: list[str], ranks: int, binaries: Path, tree: Path) -> Figures:
    """Seconds until the last of the scripts ran its first line."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "script.py").write_text(SCRIPT)
        words = [str(binaries / launcher[0]), *launcher[1:], "script.py", name]
        env = environment(Path(name, "home"), tree) | {"PATH": f"{binaries}:{os.environ['PATH']}"}
        env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        began = time.time()
        done = subprocess.run(words, env=env, cwd=name, timeout=HANGS, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{words} ended with status {done.returncode}: {done.stderr[-2000:]}")
        return {"s": max(float(Path(name, str(rank)).read_text()) for rank in range(ranks)) - began}


if __name__ == "__main__":
    program(measure, __doc__, rounds=15, against=True)
