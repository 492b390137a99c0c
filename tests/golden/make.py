"""Generator of the golden files: one version's files on disk, for every later one to read and to resume from.

    python tests/golden/make.py

The kept files are of det_core 0.1.0, main at 9e916ec, with torch 2.13. Do not make them anew because a test fails:
users have files like these. It is done when a format is given up on purpose, in the same commit.

``home/`` is a home folder: runs of one and of two ranks with two restarts each, one of them with a rescue file, as its
files were limited to 2 KB for a while; trainings that were stopped in their second epoch; a master with a search that
is finished, one that is paused, and one with a snapshot. ``bucket/`` has the objects of runs whose checkpoints are in
S3, ``told.json`` what commands said of all that. No token is kept, nor the master's log.

Where files name the folder they were made in, or the server, they have the words of :data:`NAMES` instead;
:func:`lay_out` makes a copy that names those of a test. The machine is called golden.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent
NAMES = {"folder": "/the-golden-folder", "server": "http://the-golden-server", "bucket": "the-golden-bucket"}
KEYS = {"access_key": "golden", "secret_key": "golden"}
TIMED = {"time_metric": "batches", "max_time": 1040}
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
SEARCHES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (7, 0, {"name": "grid", "max_length": 4}),
    (7, 5, {"name": "adaptive_asha", "max_trials": 4, "max_length": 16, "divisor": 2, "max_rungs": 3}),
    (3, 1010, {"name": "async_halving", "max_trials": 2, "max_concurrent_trials": 1, "num_rungs": 2, **TIMED}),
)
"""Searches, in the order of their ids: the seed, the step at which a trial waits for the pause, the method.

The third has a snapshot, as it received a thousand events.
"""


def files() -> list[Path]:
    """Return all golden files."""
    return [path for path in GOLDEN.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]


def lay_out(folder: Path, **names: str) -> None:
    """Copy the golden files into a folder: ``home``, ``bucket`` and ``scripts``.

    Args:
        folder: the home is to be ``folder/home``.
        names: what to write for the other words of :data:`NAMES`.
    """
    for part in ("home", "bucket", "scripts"):
        shutil.copytree(GOLDEN / part, folder / part)
    shutil.copy(GOLDEN / "told.json", folder)
    rename(folder, {NAMES[key]: value for key, value in {"folder": str(folder), **names}.items()})


def rename(folder: Path, words: Mapping[str, str]) -> None:
    """Write other words for some, in all files but those of checkpoints, which have checksums and name nothing."""
    for path in [folder / "told.json", *(folder / "home").rglob("*.json*"), *(folder / "home").rglob("*.lock")]:
        if "checkpoints" not in path.parts:
            text = path.read_text()
            for word, other in words.items():
                text = text.replace(word, other)
            path.write_text(text)
    database = sqlite3.connect(folder / "home" / "master" / "master.db")
    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for column in [row[1] for row in database.execute(f"PRAGMA table_info({table})")]:
            for word, other in words.items():
                change = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE typeof({column}) = 'text'"
                database.execute(f"{change} AND instr({column}, ?)", (word, other, word))
    database.commit()
    database.close()


def cold(argv: Sequence[str], *, limit: int | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a script in an interpreter of its own, whose files may have so many bytes."""
    least = limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    return subprocess.Popen([sys.executable, *argv], preexec_fn=least, **options)


def run(folder: Path, *argv: str, ranks: int = 1, start: Callable[..., Any] = cold, **variables: object) -> list[str]:
    """Run one of ``folder/scripts`` in the home ``folder/home`` until all its ranks have ended.

    Args:
        folder: see :func:`lay_out`.
        argv: the script's name and its arguments.
        ranks: how many; several get torchrun's variables.
        start: starts one, as :func:`cold` does.
        variables: more of the environment.

    Returns:
        What each rank has printed, and in the last line its exit status.
    """
    base = {name: value for name, value in os.environ.items() if not name.startswith("DET_")}
    meeting = str(folder / f"meeting-{time.monotonic_ns()}")  # a new file each time
    base |= {"DET_CORE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "MEETING": meeting}
    base |= {name: str(value) for name, value in variables.items()}
    outputs, processes = [folder / f"output{rank}" for rank in range(ranks)], []
    for rank, path in enumerate(outputs):
        numbers = dict(zip(NUMBERS, map(str, (rank, ranks, rank, ranks, 0, 1)), strict=True))
        env = base | (numbers | {"TORCHELASTIC_RUN_ID": meeting} if ranks > 1 else {})
        with path.open("w") as output:
            told = {"stdout": output.fileno(), "stderr": output.fileno()}
            processes.append(start(argv, cwd=folder / "scripts", env=env, **told))
    statuses = [process.wait() for process in processes]
    return [f"{path.read_text()}\n{status}" for path, status in zip(outputs, statuses, strict=True)]


def det_core(*words: object) -> str:
    """Return the output of a command in the home of ``DET_CORE_HOME``; it runs in this process, which is quicker."""
    from det_core.cli import main as command

    with io.TextIOWrapper(io.BytesIO(), "utf-8") as printed:
        with contextlib.redirect_stdout(printed):
            try:
                status = command([str(word) for word in words])
            except SystemExit as e:
                status = e.code
        printed.seek(0)
        text = printed.read()
    assert not status, f"det-core {words}: {status}\n{text}"
    return text


def told(command: str) -> Any:
    """Return the JSON output of a command; of ``runs export``, each line."""
    if "export" in command:
        lines = det_core(*command.split(), "--format", "jsonl", "--superseded").splitlines()
        return [json.loads(line) for line in lines]
    return json.loads(det_core(*command.split(), "--json"))


def main() -> None:
    """Make everything aside, then take the place of what is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(GOLDEN / "scripts", folder / "scripts")
        os.environ["DET_CORE_HOME"] = str(folder / "home")
        words = {name: NAMES["folder"], f'"{os.uname().nodename}"': '"golden"', make_runs(folder): NAMES["server"]}
        runs = told("runs list")
        commands = ["runs list", *(f"runs show {run['run_id']}" for run in runs)]
        commands += [f"runs export {run['run_id']}" for run in runs if run["name"].startswith("counted")]
        commands += ["experiment list", "trial list 1", "trial list 2", "trial metrics 1", "trial metrics 4"]
        try:
            make_searches(folder)
            said = {command: told(command) for command in commands}
        finally:
            det_core("master", "down")
        lines = ",\n".join(f"{json.dumps(command)}: {json.dumps(answer)}" for command, answer in said.items())
        (folder / "told.json").write_text(f"{{\n{lines}\n}}\n")
        for part in ("log", "port", "token", "lock"):
            for path in [*(folder / "home").glob(f"*.{part}"), *(folder / "home" / "master").glob(f"*{part}")]:
                path.unlink()
        rename(folder, words)
        for part in ("home", "bucket", "told.json"):
            shutil.rmtree(GOLDEN / part, ignore_errors=True)
            shutil.move(folder / part, GOLDEN / part)
    found = files()
    leaks = [(path, word) for path in found for word in words if word.encode() in path.read_bytes()]
    assert not leaks, f"it still names this machine: {leaks}"
    print(f"{len(found)} files, {sum(path.stat().st_size for path in found)} bytes")


def make_runs(folder: Path) -> str:
    """Make runs without a master; return the address of the server on which some have kept their checkpoints."""
    for ranks in (1, 2):
        name = f"counted-by-{ranks}"
        run(folder, "counting.py", ranks=ranks, NAME=name, END="KILL 6")
        limited = partial(cold, limit=2048 if ranks == 1 else None)
        run(folder, "counting.py", ranks=ranks, start=limited, NAME=name, END="TERM 9")
        run(folder, "counting.py", ranks=ranks, NAME=name, END="KILL 14")
        both = f"trainer=trainer-{ranks}", f"trial=trial-{ranks}"
        run(folder, "training.py", *both, ranks=ranks, END=11 if ranks == 1 else 5)
    assert list(folder.glob("home/runs/*/journal-1-0.1.jsonl")), "no rescue file was written"
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": KEYS["access_key"], "aws_secret_access_key": KEYS["secret_key"]}
    s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    s3.create_bucket(Bucket=NAMES["bucket"])
    storage = {"type": "s3", "bucket": NAMES["bucket"], "prefix": "models", "endpoint_url": url, **KEYS}
    for ranks in (1, 2):
        variables = {"NAME": f"counted-in-s3-by-{ranks}", "STORAGE": json.dumps(storage)}
        run(folder, "counting.py", ranks=ranks, END="TERM 5", **variables)
    for key in [found["Key"] for found in s3.list_objects_v2(Bucket=NAMES["bucket"])["Contents"]]:
        path = folder / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(s3.get_object(Bucket=NAMES["bucket"], Key=key)["Body"].read())
    server.stop()
    return url


def make_searches(folder: Path) -> None:
    """Run a master's searches, one after the other, on one slot."""
    from det_core import client

    hold, context = folder / "home" / "hold", folder / "context"
    context.mkdir()
    shutil.copy(folder / "scripts" / "searched.py", context)
    det_core("master", "up", "--slots", 1)
    for seed, step, searcher in SEARCHES:
        hold.touch()
        config = {
            "name": "golden",
            "entrypoint": "exec python searched.py",
            "hyperparameters": {"lr": {"type": "categorical", "vals": [1, 2, 4]}, "hold": step},
            "searcher": {**searcher, "metric": "loss"},
            "reproducibility": {"experiment_seed": seed},
            "max_restarts": 0,
        }
        experiment = client.create_experiment(config, context)
        if step:
            until(lambda e=experiment: any(trial.info["runner_state"] == "holds" for trial in e.trials()))
            experiment.pause()
            until(lambda e=experiment: not any(trial.info.get("allocation_id") for trial in e.trials()))
        else:
            assert experiment.wait() == "COMPLETED"
        hold.unlink()


def until(look: Callable[[], bool]) -> None:
    """Wait until it is so."""
    while not look():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
