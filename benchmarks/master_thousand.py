"""1,000 trials that finish at once, under ``random`` on 2 slots: what the master adds to them, and how large it grows.

Each trial is a script that ends at once (``true``). The whole takes from the request that creates the experiment to the
answer that it has ended. Beside it the same processes run without a master, two at a time: the trials' own (of each its
supervisor, which starts the script and writes down its end, in a folder that was laid out before), and scripts alone.

The overhead is the time of the whole less that of the trials' own processes, divided by the number of trials: deciding,
committing, laying out folders, carrying logs and journals, classifying each end and asking the search for the next
trial, as far as that keeps slots waiting. All processes share the machine's cores with the master.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import Api, running
from det_core.master.engines import Claim, LocalEngine, Slots, Ticket
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._local import _spawn

TRIALS = quick(1000, 5)
SLOTS = 2
OVERHEAD_MS = 20.0
MEMORY_MB = 500
COMMAND = ["true"]
CONFIG = {
    "name": "thousand",
    "entrypoint": COMMAND,
    "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
    "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": TRIALS},
    "max_restarts": 0,
}


def measure(args: Args) -> Tables:
    # Before there is a master, which would take processors from both.
    scripts = two_at_a_time(lambda number: subprocess.run(COMMAND, check=True))
    alone = supervised()
    with running(SLOTS) as master:
        before = master.cpu()
        took, trials = whole(master.api())
        cpu = master.cpu() - before
        memory = master.peak() / 1e6
    # A trial that fails at its start would be cheaper than one that runs.
    if [trial["state"] for trial in trials] != ["STATE_COMPLETED"] * TRIALS:
        raise RuntimeError(f"not all of {TRIALS} trials were completed")
    ms = 1e3 / TRIALS
    table = Table(f"{TRIALS:,} trials that finish at once, random on {SLOTS} slots", ["found"])
    table.row("with the master, ms a trial", took * ms)
    table.row("the trials' own processes, ms a trial", alone * ms)
    table.row("the scripts alone, ms a trial", scripts * ms)
    table.row("overhead, ms a trial", (took - alone) * ms, bound=at_most((took - alone) * ms, OVERHEAD_MS))
    table.row("processor time of the master, ms a trial", cpu * ms)
    table.row("its largest memory, MB", memory, bound=at_most(memory, MEMORY_MB))
    yield table


def whole(api: Api) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that the experiment takes, and its trials."""
    began = time.perf_counter()
    number = api.create(CONFIG)
    # The master answers after a minute at most, ended or not.
    while "endTime" not in api.ask("GET", f"experiments/{number}/wait?timeout_seconds=60")["experiment"]:
        pass
    took = time.perf_counter() - began
    return took, api.ask("GET", f"experiments/{number}/trials")["trials"]


def supervised() -> float:
    """Seconds that the supervisors and their scripts take, two at a time."""
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as home:
        engine = LocalEngine(Path(home), Slots(SLOTS))
        folders = [laid_out(engine, Path(home), number) for number in range(TRIALS)]
        return two_at_a_time(lambda number: os.waitpid(_spawn(folders[number]), 0))


def laid_out(engine: LocalEngine, home: Path, number: int) -> AllocationFolder:
    """Make the directory of an allocation, ready for its supervisor, and return it."""
    folder = AllocationFolder(home / "master" / "allocations" / f"1.{number}.1")
    ids = (f"1.{number}.1", f"1.{number}", 1, number, 1, 0)
    hparams = {"lr": 0.5}
    ticket = Ticket(*ids, hparams, {}, 1, [0], "http://x", COMMAND, "code")
    folder.create(ticket)
    engine._lay_out(folder, ticket, Claim("token of the node", "token"))
    return folder


def two_at_a_time(run: Callable[[int], object]) -> float:
    """Seconds that it takes to run all of them, as many at a time as there are slots."""
    began = time.perf_counter()
    with ThreadPoolExecutor(SLOTS) as threads:
        list(threads.map(run, range(TRIALS)))
    return time.perf_counter() - began


if __name__ == "__main__":
    program(measure, __doc__)
