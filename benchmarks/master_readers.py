"""``GET experiment`` alone, and beside six readers that read the 60,000 rows of one trial again and again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import Api, Master, running
from benchmarks._processes import ROOT, environment
from benchmarks.master_trials import SEARCHER, milliseconds

ROWS = quick(60_000, 2_000)
READERS = quick(6, 2)
TIMES = 10.0
"""Bound: how much longer a request may take beside the readers."""
READER = """
import sys
from benchmarks._master import Api
api = Api(*sys.argv[1:3])
while True:
    rows = len(api.ask("GET", "trials/metrics/training_metrics?trialIds=" + sys.argv[3]))
    print(rows, flush=True)
"""


def measure(args: Args) -> Tables:
    with running(0) as master:
        api = master.api()
        trial = fill(api)
        alone = milliseconds(lambda: api.ask("GET", "experiments/1"))
        with readers(master, trial):
            beside = milliseconds(lambda: api.ask("GET", "experiments/1"))
    table = Table(f"GET experiment, median, beside readers of {ROWS:,} rows", ["ms", "times"])
    table.row("alone", alone, 1.0)
    table.row(f"{READERS} readers", beside, beside / alone, bound=at_most(beside / alone, TIMES))
    yield table


def fill(api: Api) -> int:
    """Create an unmanaged trial with all rows, and return its number."""
    experiment = api.create({"name": "readers", "searcher": SEARCHER}, unmanaged=True)
    trial = api.ask("POST", "trials", {"experimentId": experiment, "hparams": {}, "unmanaged": True})["trial"]["id"]
    api.ask("POST", f"trials/{trial}/start", {"resume": False})
    head = {"trialId": trial, "trialRunId": 1, "rank": 0, "restart": 0}
    kind = {"kind": "metrics", "time": 1.7e9, "group": "training"}
    for first in range(0, ROWS, 1000):
        steps = range(first, first + 1000)
        records = [{**kind, "seq": s, "steps_completed": s, "metrics": {"loss": 1 / (s + 1), "lr": 0.1}} for s in steps]
        api.ask("POST", "journal", {**head, "records": records})
    return int(trial)


@contextmanager
def readers(master: Master, trial: int) -> Iterator[None]:
    """Run the readers, each of which has read all rows once when the block begins."""
    command = [sys.executable, "-c", READER, master.url, master.token, str(trial)]
    env = environment(master.home, ROOT)
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(READERS)]
    try:
        for process in processes:
            assert process.stdout is not None and int(process.stdout.readline()) > 0
        yield
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a reader has failed")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    program(measure, __doc__)
