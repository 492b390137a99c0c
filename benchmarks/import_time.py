"""Time of ``from det_core import core`` beyond a bare interpreter, beside the imports of the peers' users.

A part of core is loaded when its name is first used, so the second row is what a script has paid that calls ``init``.
Each turn runs ``pass`` beside the import, and the difference counts, so that a slow moment meets both.
"""

import functools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._bench import PEERS, Args, Table, Tables, at_most, program
from benchmarks._processes import DETERMINED, ROOT, environment, peers, trees
from benchmarks._turns import Figures, alternate

BOUND = 30.0  # ms
IMPORT = "from det_core import core"
RIVALS = {DETERMINED: "from determined import core", "mlflow-skinny": "import mlflow", "wandb": "import wandb",
          "trackio": "import trackio"}  # fmt: skip


def measure(args: Args) -> Tables:
    run = functools.partial
    contenders = {name: run(beyond, sys.executable, IMPORT, tree) for name, tree in trees(args.against).items()}
    contenders["det_core, and core.init"] = run(beyond, sys.executable, f"{IMPORT}; core.init", ROOT)
    if PEERS:
        python = str(peers(*RIVALS))
        contenders |= {name: run(beyond, python, code, ROOT) for name, code in RIVALS.items()}
    for contender in contenders.values():
        contender()  # fills the caches of files and bytecode
    table = Table(f"import, ms beyond a bare interpreter, median of {args.rounds}", ["ms"])
    table.fill(alternate(contenders, args.rounds), lambda ms: at_most(ms, BOUND))
    yield table


def beyond(python: str, code: str, tree: Path) -> Figures:
    """Milliseconds of an interpreter that runs ``code``, less those of one that does nothing."""
    with tempfile.TemporaryDirectory() as home:
        took = []
        for each in (code, "pass"):
            began = time.perf_counter()
            # In an empty folder: ``-c`` imports from the working one first, where this tree would hide --against's.
            subprocess.run([python, "-c", each], env=environment(Path(home), tree), cwd=home, check=True, timeout=120)
            took.append(time.perf_counter() - began)
    return {"ms": 1e3 * (took[0] - took[1])}


if __name__ == "__main__":
    program(measure, __doc__, rounds=16, against=True)
