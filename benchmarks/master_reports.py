"""Reports of ten floats a second into a master over HTTP from 8 writers, until they can be read back; and into mlflow.

Each writer is a process that reports for a trial of its own. What it sends is made before the clock starts, as it would
lie in a journal; mlflow's client makes its requests itself, in batches as large as its server takes.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks._bench import OURS, PEERS, Args, Table, Tables, at_least, program, quick
from benchmarks._master import Master, running, until
from benchmarks._processes import environment, peers, two_free_ports

RATE = 20_000  # reports a second
WRITERS, REPORTS, MLFLOW_REPORTS = *quick((8, 20_000), (2, 100)), 500
HEAD = "import json, sys\n"
GO = "print('ready', flush=True); sys.stdin.readline()\n"
"""A process says that it is ready, and waits for its word."""
WRITER = HEAD + """
from benchmarks._master import Api
url, token, trial, reports = *sys.argv[1:3], *map(int, sys.argv[3:])
records = [
    {"kind": "metrics", "seq": step - 1, "time": 1.7e9, "group": "training", "steps_completed": step,
     "metrics": {f"metric_{i}": i * 0.1234567 + step for i in range(10)}}
    for step in range(1, reports + 1)
]
head, api = {"trialId": trial, "trialRunId": 1, "rank": 0, "restart": 0}, Api(url, token)
bodies = [json.dumps({**head, "records": records[at : at + 1000]}).encode() for at in range(0, reports, 1000)]
api.ask("GET", "me")
""" + GO + """
for body in bodies:
    api.ask("POST", "journal", body)
"""  # fmt: skip
CLIENT = HEAD + "from mlflow import MlflowClient\nclient = MlflowClient(sys.argv[1])\n"
MLFLOW = CLIENT + """
from mlflow.entities import Metric
run, reports = sys.argv[2], int(sys.argv[3])
metrics = [Metric(f"metric_{i}", step * 0.1 + i, 0, step) for step in range(1, reports + 1) for i in range(10)]
""" + GO + """
for at in range(0, len(metrics), 1000):  # as many as it takes
    client.log_batch(run, metrics[at : at + 1000])
"""  # fmt: skip
RUNS = CLIENT + "print(json.dumps([client.create_run('0').info.run_id for _ in range(int(sys.argv[2]))]))"
READER = CLIENT + GO + """
for run in json.loads(sys.argv[2]):
    assert client.get_run(run).data.metrics["metric_9"] == int(sys.argv[3]) * 0.1 + 9
"""  # fmt: skip


def measure(args: Args) -> Tables:
    # Unmanaged trials run where they like, and need no slots.
    with running(0) as master:
        found = {OURS: ours(master)}
    found |= {"mlflow server": mlflow()} if PEERS else {}
    title = f"reports of ten floats a second from {WRITERS} writers, until they can be read back"
    table = Table(title, ["reports/s", "ours is times"])
    for who, rate in found.items():
        table.row(who, rate, found[OURS] / rate, bound=at_least(rate, RATE) if who == OURS else None)
    yield table


def ours(master: Master) -> float:
    """Return the reports a second into our master, by POST /api/v1/journal."""
    api = master.api()
    trials = []
    searcher = {"name": "single", "metric": "metric_0", "max_length": 1}
    experiment = api.create({"name": "reports", "searcher": searcher}, unmanaged=True)
    for _ in range(WRITERS):
        made = api.ask("POST", "trials", {"experimentId": experiment, "hparams": {}, "unmanaged": True})
        trials.append(made["trial"]["id"])
        api.ask("POST", f"trials/{trials[-1]}/start", {"resume": False})
        api.ask("PATCH", f"trials/{trials[-1]}", {"state": "STATE_RUNNING"})

    def readable() -> None:
        seen = [api.ask("GET", f"trials/{trial}")["trial"]["totalBatchesProcessed"] for trial in trials]
        assert seen == [REPORTS] * WRITERS, seen

    words = [sys.executable, "-c", WRITER, master.url, master.token]
    seconds = timed([[*words, str(trial), str(REPORTS)] for trial in trials], readable)
    lines = api.ask("GET", f"trials/metrics/training_metrics?trialIds={trials[-1]}")
    rows = [row for line in lines for row in json.loads(line)["result"]["metrics"]]
    assert len(rows) == REPORTS and len(rows[-1]["metrics"]["avgMetrics"]) == 10, f"{len(rows)} rows, {rows[-1:]}"
    return WRITERS * REPORTS / seconds


def mlflow() -> float:
    """Return the reports a second into mlflow's server."""
    python = str(peers("mlflow"))
    port = str(two_free_ports())
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        command = [python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        command += ["--artifacts-destination", folder, "--host", "127.0.0.1", "--port", port, "--workers", "2"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: answers(f"{url}/health"), server.poll)
            runs = subprocess.run([python, "-c", RUNS, url, str(WRITERS)], stdout=-1, text=True, check=True).stdout
            count = str(MLFLOW_REPORTS)
            words = [[python, "-c", MLFLOW, url, run, count] for run in json.loads(runs)]
            # Started before the clock, as what mlflow's client takes to import is not the server's time.
            with started([[python, "-c", READER, url, runs, count]]) as readers:
                return WRITERS * MLFLOW_REPORTS / timed(words, lambda: finish(readers))
        finally:
            server.terminate()
            server.wait()


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        urlopen(url, timeout=10).close()
    except (URLError, OSError):
        return False
    return True


def timed(commands: Sequence[Sequence[str]], readable: Callable[[], None]) -> float:
    """Seconds from the moment that all writers may begin until ``readable`` has returned."""
    with started(commands) as writers:
        began = time.perf_counter()
        finish(writers)
        readable()
        return time.perf_counter() - began


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that wait for a line on stdin, and kill them at the end."""
    env = environment(Path(os.devnull))
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n", "a process did not start"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give all of them their word, and wait until they have done what they do."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    # A list, so that all have ended when the first failure is found.
    assert not any([process.wait() for process in processes]), "a process failed"


if __name__ == "__main__":
    program(measure, __doc__)
