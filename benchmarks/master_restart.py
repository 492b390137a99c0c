"""Restart of a master in the middle of a search of 10,000 trials, until its first answer, and its memory then.

The trials are those of an adaptive ASHA whose scripts exit at once, by an engine that runs no processes. The clock
starts with the process of the second master, so its imports count too.
"""

import tempfile
import time
from pathlib import Path

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import running_at, until

TRIALS = quick(10_000, 50)
SLOTS = 64
SECONDS = 2.0
MEMORY_MB = 200 * 2**20 / 1e6
CONFIG = {
    "name": "restart",
    "entrypoint": "true",
    "hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}},
    # More than are run, so that the search goes on after the restart.
    "searcher": {"name": "adaptive_asha", "metric": "loss", "max_length": 4096, "max_trials": 2 * TRIALS,
                 "max_concurrent_trials": SLOTS},
}  # fmt: skip


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        home = Path(folder)
        with running_at(home, SLOTS, "benchmarks._master", "--instant") as master:
            api = master.api()
            number = api.create(CONFIG)
            until(lambda: api.ask("GET", f"experiments/{number}/trials?limit=1")["pagination"]["total"] >= TRIALS)
            api.ask("POST", f"experiments/{number}/pause")
        began = time.perf_counter()
        with running_at(home, SLOTS, "benchmarks._master") as master:
            experiment = master.api().ask("GET", f"experiments/{number}")["experiment"]
            seconds = time.perf_counter() - began
            cpu = master.cpu()
            memory = master.peak() / 1e6
    table = Table(f"restart of a master with {experiment['numTrials']:,} trials of a search", ["found"])
    table.row("first answer, s", seconds, bound=at_most(seconds, SECONDS))
    table.row("processor time until then, s", cpu)
    table.row("memory at most, MB", memory, bound=at_most(memory, MEMORY_MB))
    yield table


if __name__ == "__main__":
    program(measure, __doc__)
