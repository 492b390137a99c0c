"""1,000 trials that finish at once, under ``random`` on 2 slots: what the master adds to them, and how large it grows.

Run it with ``python -m benchmarks.master_thousand``. Each trial is a script that ends at once (``true``). The whole
takes from the request that creates the experiment to the answer that it has ended. Beside it the same processes are run
without a master, two at a time, each as soon as one before it has ended:

- the trials' own processes: of each its supervisor, which starts the script and writes down its end, in a folder that
  was laid out before;
- the scripts alone.

The overhead is the time of the whole less that of the trials' own processes, divided by the number of trials: deciding,
committing, laying out folders, carrying logs and journals, classifying each end and asking the search for the next
trial, as far as that keeps slots waiting. All processes share the machine's cores with the master.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._master import Api, running
from benchmarks._program import options, quick, status
from benchmarks._table import print_table
from det_core.master.engines import LaunchSpec, LocalEngine, Slots
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._local import _spawn

TRIALS, SLOTS = quick(1000, 5), 2
BOUND = 0.020
"""Seconds a trial."""
MEMORY = 500e6
COMMAND = ["true"]


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    scripts = _two_at_a_time(_script)
    alone = _supervised()
    with running("--slots", str(SLOTS)) as master:
        before = master.cpu()
        took, trials = _whole(master.api())
        cpu, memory = master.cpu() - before, master.peak()
    if [trial["state"] for trial in trials] != ["STATE_COMPLETED"] * TRIALS:
        raise RuntimeError(f"not all of {TRIALS} trials were completed")
    overhead = (took - alone) / TRIALS
    rows = [
        ("with the master, ms a trial", took / TRIALS * 1e3, None, None),
        ("the trials' own processes, ms a trial", alone / TRIALS * 1e3, None, None),
        ("the scripts alone, ms a trial", scripts / TRIALS * 1e3, None, None),
        ("overhead, ms a trial", overhead * 1e3, BOUND * 1e3, overhead <= BOUND),
        ("processor time of the master, ms a trial", cpu / TRIALS * 1e3, None, None),
        ("its largest memory, MB", memory / 1e6, MEMORY / 1e6, memory <= MEMORY),
    ]
    print_table(f"{TRIALS:,} trials that finish at once, random on {SLOTS} slots", ("", "found", "bound", "met"), rows)
    return [row[3] for row in rows].count(False)


def _whole(api: Api) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that the experiment takes, and its trials."""
    config = {
        "name": "thousand",
        "entrypoint": COMMAND,
        "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": TRIALS},
        "max_restarts": 0,
    }
    began = time.perf_counter()
    number = api.ask("POST", "experiments", {"config": config})["experiment"]["id"]
    while "endTime" not in api.ask("GET", f"experiments/{number}/wait?timeout_seconds=60")["experiment"]:
        pass
    took = time.perf_counter() - began
    return took, api.ask("GET", f"experiments/{number}/trials")["trials"]


def _script(_number: int) -> None:
    """Run one script."""
    subprocess.run(COMMAND, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _supervised() -> float:
    """Seconds that the supervisors and their scripts take, two at a time."""
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as home:
        engine = LocalEngine(Path(home), Slots(SLOTS))
        folders = [_laid_out(engine, Path(home), number) for number in range(TRIALS)]

        def run(number: int) -> None:
            os.waitpid(_spawn(folders[number], appear=True), 0)

        return _two_at_a_time(run)


def _laid_out(engine: LocalEngine, home: Path, number: int) -> AllocationFolder:
    """The folder of an allocation, ready for its supervisor."""
    folder = AllocationFolder(home / "master" / "allocations" / f"1.{number}.1")
    spec = LaunchSpec(
        f"1.{number}.1", f"1.{number}", 1, number, 1, 0, {"lr": 0.5}, {}, [0], "token", "http://x", COMMAND
    )
    engine._lay_out(folder, spec, number % SLOTS)
    return folder


def _two_at_a_time(run: Callable[[int], None]) -> float:
    """Seconds that it takes to run all of them, as many at a time as there are slots."""
    left = iter(range(TRIALS))

    def one_after_the_other() -> None:
        while (number := next(left, None)) is not None:
            run(number)

    began = time.perf_counter()
    threads = [threading.Thread(target=one_after_the_other) for _ in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(status(main()))
