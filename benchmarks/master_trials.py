"""Lists of an experiment with 1,500 trials of 20 validations each, and 1,400 unmanaged trials filled by 4 threads."""

import statistics
import threading
import time
from collections.abc import Callable

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import Api, Master, running

TRIALS, FILLED, VALIDATIONS = quick((1500, 1400, 20), (20, 20, 3))
THREADS = 4
REPEATS = quick(9, 2)
SEARCHER = {"name": "single", "metric": "loss", "max_length": 1}


def measure(args: Args) -> Tables:
    with running(0) as master:
        seconds = fill(master, FILLED, validations=2)
        table = Table(f"{FILLED} unmanaged trials created, started, filled and completed by {THREADS} threads", ["s"])
        table.row("det_core", seconds, bound=at_most(seconds, 20))
        yield table
    with running(0) as master:
        fill(master, TRIALS, validations=VALIDATIONS)
        api = master.api()
        table = Table(f"an experiment of {TRIALS} trials with {VALIDATIONS} validations each", ["ms"])
        rows = {
            "GET experiment": ("experiments/1", 25),
            "page of 100": ("experiments/1/trials?limit=100&sort_by=SORT_BY_BEST_VALIDATION_METRIC", 100),
            "last page": (f"experiments/1/trials?limit=100&offset={max(TRIALS - 100, 0)}", 100),
            "list of experiments": ("experiments", 25),
        }
        for title, (path, bound) in rows.items():
            took = milliseconds(lambda path=path: api.ask("GET", path))
            table.row(title, took, bound=at_most(took, bound))
        yield table


def fill(master: Master, number: int, *, validations: int) -> float:
    """Create, start, fill and complete trials of one experiment from some threads; return the seconds it took."""
    experiment = master.api().create({"name": "many", "searcher": SEARCHER}, unmanaged=True)
    left = iter(range(number))
    lock = threading.Lock()

    def work() -> None:
        api = master.api()
        while True:
            with lock:
                if (index := next(left, None)) is None:
                    return
            fill_one(api, experiment, index, validations)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def fill_one(api: Api, experiment: int, index: int, validations: int) -> None:
    body = {"experimentId": experiment, "hparams": {"index": index}, "unmanaged": True}
    trial = api.ask("POST", "trials", body)["trial"]["id"]
    api.ask("POST", f"trials/{trial}/start", {"resume": False})
    records = [
        {
            "kind": "metrics",
            "seq": step,
            "time": 1.7e9,
            "group": "validation",
            "steps_completed": step,
            "metrics": {"loss": (index * 7919 % 1000 + 1) / step, "accuracy": 0.5},
        }
        for step in range(1, validations + 1)
    ]
    head = {"trialId": trial, "trialRunId": 1, "rank": 0, "restart": 0}
    api.ask("POST", "journal", {**head, "records": records})
    api.ask("PATCH", f"trials/{trial}", {"state": "STATE_COMPLETED"})


def milliseconds(ask: Callable[[], object]) -> float:
    """Return the median of some calls after a first one."""
    ask()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ask()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    program(measure, __doc__)
