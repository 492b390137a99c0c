"""1,000 trials that finish at once, under ``random`` on 2 slots: what the master adds to them, and how large it grows.

Run it with ``python -m benchmarks.master_thousand``. Each trial is a process that ends at once (``true``). The whole
takes from the request that creates the experiment to the answer that it has ended. The same processes are also started
without a master, two at a time, each as soon as one before it has ended. The overhead is the difference of the two
times, divided by the number of trials: all of deciding, committing, laying out the trial's folder, its supervisor,
carrying its log, classifying its end and asking the search for the next one, as far as that keeps slots waiting.
"""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Any

from benchmarks._master import Api, running
from benchmarks._table import print_table

TRIALS, SLOTS = 1000, 2
BOUND = 0.020
"""Seconds a trial."""
MEMORY = 500e6
COMMAND = ["true"]


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    alone = _alone()
    with running("--slots", str(SLOTS)) as master:
        before = master.cpu()
        took, trials = _whole(master.api())
        cpu, memory = master.cpu() - before, master.peak()
    if [trial["state"] for trial in trials] != ["STATE_COMPLETED"] * TRIALS:
        raise RuntimeError(f"not all of {TRIALS} trials were completed")
    overhead = (took - alone) / TRIALS
    rows = [
        ("with the master, ms a trial", took / TRIALS * 1e3, None, None),
        ("without it, ms a trial", alone / TRIALS * 1e3, None, None),
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


def _alone() -> float:
    """Seconds that the same processes take without a master, two at a time."""
    left = iter(range(TRIALS))

    def one_after_the_other() -> None:
        while next(left, None) is not None:
            subprocess.run(COMMAND, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    began = time.perf_counter()
    threads = [threading.Thread(target=one_after_the_other) for _ in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
