"""Reports of ten floats a second into a master over HTTP from 8 writers, until they can be read back; and into mlflow.

Run it with ``python -m benchmarks.master_reports``. Each writer is a process that reports for a trial of its own. What
it sends is made before the clock starts, as it would lie in a journal; mlflow's client makes its requests itself, in
batches as large as its server takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks._master import TIMEOUT, Api, Master, running
from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

OURS = "det_core, POST /api/v1/journal"
WRITERS = quick(8, 2)
BOUND = 20_000
"""Reports a second, by the batch route."""
BATCH = 1000
REPORTS = {"journal": quick(20_000, 100), "metrics": quick(500, 10), "mlflow, batches": 500, "mlflow, one by one": 50}
"""Reports of each writer."""
FLOATS = {f"metric_{i}": i * 0.1234567 for i in range(10)}
MLFLOW_BATCH = 1000 // len(FLOATS)
"""Reports in one of mlflow's batches, which take 1,000 metrics."""
MLFLOW = """
import json, sys
from mlflow import MlflowClient
from mlflow.entities import Metric
url, run, reports, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = MlflowClient(url)
metrics = [Metric(f"metric_{i}", step * 0.1 + i, 0, step) for step in range(1, reports + 1) for i in range(10)]
print("ready", flush=True); sys.stdin.readline()
for at in range(0, len(metrics), batch * 10):
    client.log_batch(run, metrics[at : at + batch * 10])
print("done", flush=True)
"""


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    found: dict[str, float] = {}
    with running("--slots", "0") as master:
        found[OURS] = _ours(master, "journal")
        found["det_core, POST /api/v1/trials/T/metrics"] = _ours(master, "metrics")
    found |= {} if QUICK else _mlflow()
    ours = found[OURS]
    rows = [
        (who, rate, ours / rate, BOUND if who == OURS else None, rate >= BOUND if who == OURS else None)
        for who, rate in found.items()
    ]
    print_table(
        f"reports of ten floats a second from {WRITERS} writers, until they can be read back",
        ("", "reports/s", "the first is times", "bound", "met"),
        rows,
    )
    return int(ours < BOUND)


def _ours(master: Master, route: str) -> float:
    reports, api = REPORTS[route], master.api()
    config = "name: reports\nsearcher: {name: single, metric: metric_0, max_length: 1}\n"
    experiment = api.ask("POST", "experiments", {"config": config, "unmanaged": True})["experiment"]["id"]
    trials = [
        api.ask("POST", "trials", {"experimentId": experiment, "hparams": {}, "unmanaged": True})["trial"]["id"]
        for _ in range(WRITERS)
    ]
    for trial in trials:
        api.ask("POST", f"trials/{trial}/start", {"resume": False})
        api.ask("PATCH", f"trials/{trial}", {"state": "STATE_RUNNING"})
    commands = [
        [sys.executable, "-m", "benchmarks.master_reports", master.url, master.token, str(trial), route, str(reports)]
        for trial in trials
    ]

    def readable() -> None:
        for trial in trials:
            seen = api.ask("GET", f"trials/{trial}")["trial"]["totalBatchesProcessed"]
            if seen != reports:
                raise RuntimeError(f"trial {trial} is at step {seen}, not {reports}")

    seconds = _timed(commands, readable)
    lines = api.ask("GET", f"trials/metrics/training_metrics?trialIds={trials[-1]}")
    rows = [row for line in lines for row in json.loads(line)["result"]["metrics"]]
    if len(rows) != reports or len(rows[-1]["metrics"]["avgMetrics"]) != len(FLOATS):
        raise RuntimeError(f"{len(rows)} rows are there, not {reports}")
    return WRITERS * reports / seconds


def _mlflow() -> dict[str, float]:
    python = peers_python("mlflow")
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as folder:
        url = "http://127.0.0.1:18099"
        server = subprocess.Popen(
            [str(python), "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
            + ["--artifacts-destination", folder, "--host", "127.0.0.1", "--port", "18099", "--workers", "2"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(url + "/health", server)
            return {
                "mlflow server, batches": _mlflow_rate(python, url, "mlflow, batches", MLFLOW_BATCH),
                "mlflow server, one by one": _mlflow_rate(python, url, "mlflow, one by one", 1),
            }
        finally:
            server.terminate()
            server.wait(TIMEOUT)


def _mlflow_rate(python: Path, url: str, name: str, batch: int) -> float:
    reports = REPORTS[name]
    make = f"from mlflow import MlflowClient as C; c = C({url!r})\n"
    make += f"for _ in range({WRITERS}): print(c.create_run('0').info.run_id)"
    output = subprocess.run([str(python), "-c", make], stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT)
    runs = output.stdout.split()
    commands = [[str(python), "-c", MLFLOW, url, run, str(reports), str(batch)] for run in runs]
    look = f"from mlflow import MlflowClient as C; c = C({url!r})\n"
    look += f"for run in {runs}: assert c.get_run(run).data.metrics['metric_9'] == {reports} * 0.1 + 9"
    reader = [str(python), "-c", "print('ready', flush=True); input()\n" + look]

    with subprocess.Popen(reader, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as checking:
        assert checking.stdout is not None
        checking.stdout.readline()
        seconds = _timed(commands, lambda: _asked(checking))
    return WRITERS * reports / seconds


def _asked(checking: subprocess.Popen[bytes]) -> None:
    checking.communicate(b"\n", timeout=TIMEOUT)
    if checking.returncode:
        raise RuntimeError("mlflow does not have all that was reported")


def _timed(commands: Sequence[Sequence[str]], readable: Callable[[], None]) -> float:
    """Seconds from the moment that all writers may begin until ``readable`` has returned."""
    writers = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for c in commands]
    try:
        for writer in writers:
            assert writer.stdout is not None
            if writer.stdout.readline() != b"ready\n":
                raise RuntimeError("a writer did not start")
        began = time.perf_counter()
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"\n")
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout is not None
            if writer.stdout.readline() != b"done\n":
                raise RuntimeError("a writer failed")
        readable()
        return time.perf_counter() - began
    finally:
        for writer in writers:
            writer.communicate(timeout=TIMEOUT)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            urlopen(url, timeout=10).close()
            return
        except (URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("mlflow's server does not start") from None
            time.sleep(0.1)


def write(url: str, token: str, trial: str, route: str, reports: int) -> None:
    """What each of our writers does."""
    from det_core.journal._format import encode

    lines = [
        encode(
            {"kind": "metrics", "seq": step - 1, "time": 1.7e9, "group": "training", "steps_completed": step}
            | {"metrics": {name: value + step for name, value in FLOATS.items()}}
        ).strip()
        for step in range(1, reports + 1)
    ]
    head = b'{"trialId":%d,"trialRunId":1,"rank":0,"restart":0,"records":[' % int(trial)
    if route == "journal":
        bodies = [head + b",".join(lines[at : at + BATCH]) + b"]}" for at in range(0, reports, BATCH)]
        path = "journal"
    else:
        bodies, path = [_one(json.loads(line)) for line in lines], f"trials/{trial}/metrics"
    api = Api(url, token)
    api.ask("GET", "me")
    print("ready", flush=True)
    sys.stdin.readline()
    for body in bodies:
        api.ask("POST", path, body)
    print("done", flush=True)


def _one(record: dict[str, object]) -> bytes:
    values = {"avgMetrics": record["metrics"], "batchMetrics": None}
    metrics = {"trialRunId": 1, "stepsCompleted": record["steps_completed"], "metrics": values}
    return json.dumps({"group": "training", "metrics": metrics}).encode()


if __name__ == "__main__":
    if len(sys.argv) == 6:
        write(*sys.argv[1:5], int(sys.argv[5]))
    else:
        raise SystemExit(status(main()))
