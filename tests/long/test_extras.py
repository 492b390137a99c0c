"""Each extra of the wheel in an environment with its own packages alone: what it is for works there.

``torch`` and ``master`` run README (``trainings/test_readme.py``). ``deepspeed`` and ``horovod`` are compiled, by
``support/frameworks.sh``, and run by ``make test-launchers``. An extra that another one is needed for is installed with
it, and the two that bring torch share an environment.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support import EXAMPLES, ROOT
from support.environments import dist, install, run, wheel
from support.leftovers import processes_of
from support.postgres import Postgres, postgres_server
from support.servers import GcsServer, S3Server, gcs_server, moto_server

__all__ = ["dist", "gcs_server", "moto_server", "postgres_server", "wheel"]
REPORT = """
    ctx.train.report_training_metrics(steps_completed=1, metrics={"loss": 0.5})
"""
SAVE = """
from det_core import core
storage = STORAGE
with core.init(name="stored", checkpoint_storage=storage, check_storage=True) as ctx:
    with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        (path / "model.bin").write_bytes(bytes(1000))
with core.init(name="stored", checkpoint_storage=storage, resume="latest") as ctx:
    assert ctx.latest_checkpoint == storage_id
    with ctx.checkpoint.restore_path(storage_id) as path:
        assert (path / "model.bin").read_bytes() == bytes(1000)
"""
MISSING = (
    ("azure", "core.init(checkpoint_storage='az://c', check_storage=True)"),
    ("gcs", "core.init(checkpoint_storage='gs://b', check_storage=True)"),
    ("s3", "core.init(checkpoint_storage='s3://b', check_storage=True)"),
    ("master", "client.experiments()"),
    ("profiler", "core.init().profiler.on()"),
    ("torch", "from det_core import pytorch"),
    ("torch", "from det_core import accelerated"),
)
"""Extras, and what cannot be done without them."""
CAUGHT = """
from det_core import client, core
from det_core.errors import MissingExtra
try:
    CODE
except MissingExtra as e:
    print(e)
"""
Extra = Callable[..., Path]


@pytest.fixture
def extra(wheel: Path, tmp_path: Path) -> Extra:
    """Return a function that makes an environment with the wheel and some of its extras."""

    def made(*names: str) -> Path:
        folder = tmp_path / "environment"
        folder.mkdir()
        return install(wheel, folder, *names)

    return made


def runs(python: Path, code: str, folder: Path, said: str = "stdout") -> str:
    """Return the output of a script."""
    script = folder / "script.py"
    script.write_text(code)
    found: str = getattr(run(python, script, cwd=folder), said)
    return found


def det_core(python: Path, *words: str, folder: Path) -> str:
    """Return the output of a command."""
    return run(python.with_name("det-core"), *words, cwd=folder).stdout


def with_report(**arguments: str) -> str:
    """Return a script that reports once."""
    given = "".join(f", {name}={value}" for name, value in arguments.items())
    return f"from det_core import core\nwith core.init(name='packaged'{given}) as ctx:{REPORT}"


def test_none(extra: Extra, tmp_path: Path) -> None:
    python = extra()
    runs(python, with_report(), tmp_path)
    assert "packaged" in det_core(python, "runs", "show", "latest", folder=tmp_path)
    assert runs(python, "from det_core import client; print(client.run('latest').metrics())", tmp_path).startswith("[{")
    for name, code in MISSING:
        said = runs(python, CAUGHT.replace("CODE", code), tmp_path)
        assert f"pip install '.[{name}]'" in said and said.count("\n") == 1, (name, said)
    export = [python.with_name("det-core"), "runs", "export", "latest", "--format", "parquet", "--output", "rows"]
    done = subprocess.run(export, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install '.[data]'" in done.stderr
    said = runs(python, with_report(tensorboard_mode="core.TensorboardMode.AUTO"), tmp_path, said="stderr")
    assert "pip install '.[tensorboard]'" in said


def test_profiler(extra: Extra, tmp_path: Path) -> None:
    code = """
from det_core import client, core
with core.init(name="watched") as ctx:
    ctx.profiler.on(sampling_interval=0.1, samples_per_report=1)
    while not list(client.run("latest").rows("cpu")):
        pass
"""
    python = extra("profiler")
    runs(python, "import psutil, pynvml" + code, tmp_path)
    shown = det_core(python, "runs", "show", "latest", folder=tmp_path)
    assert all(re.search(rf"^{group} ", shown, re.M) for group in ("cpu", "memory", "disk", "network"))


def test_data(extra: Extra, tmp_path: Path) -> None:
    python = extra("data")
    runs(python, with_report(), tmp_path)
    table = "from det_core import client; print(type(client.run('latest').metrics('training')).__name__)"
    assert runs(python, table, tmp_path) == "DataFrame\n"
    det_core(python, "runs", "export", "latest", "--format", "parquet", "--output", "rows.parquet", folder=tmp_path)
    assert runs(python, "import pandas; print(pandas.read_parquet('rows.parquet').loss[0])", tmp_path) == "0.5\n"


def test_tensorboard(extra: Extra, tmp_path: Path) -> None:
    python = extra("tensorboard")
    runs(python, with_report(tensorboard_mode="core.TensorboardMode.AUTO"), tmp_path)
    code = """
import sys
from pathlib import Path
from det_core import client
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
(file,) = Path(client.run("latest").path, "tensorboard").rglob("*tfevents*")
events = EventAccumulator(str(file)).Reload()
print([(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)])
"""
    assert runs(python, code, tmp_path) == "[('training/loss', 1, 0.5)]\n"


def test_s3(extra: Extra, moto_server: S3Server, tmp_path: Path) -> None:
    storage = moto_server.storage(moto_server.make_bucket(), "some/prefix")
    runs(extra("s3"), SAVE.replace("STORAGE", repr(storage)), tmp_path)


def test_gcs(extra: Extra, gcs_server: GcsServer, tmp_path: Path) -> None:
    storage = {"type": "gcs", "bucket": gcs_server.make_bucket(), "endpoint_url": gcs_server.url}
    runs(extra("gcs"), SAVE.replace("STORAGE", repr(storage)), tmp_path)


def test_azure(extra: Extra, tmp_path: Path) -> None:
    """No server of that protocol is at hand: the driver is there, and says what it cannot reach."""
    python = extra("azure")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        key = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;"
        key += f"BlobEndpoint=http://127.0.0.1:{nobody.getsockname()[1]}/a"
        storage = {"type": "azure", "container": "c", "connection_string": key}
        code = CAUGHT.replace("CODE", f"core.init(checkpoint_storage={storage}, check_storage=True)")
        said = runs(python, code.replace("MissingExtra", "StorageError"), tmp_path)
    assert "checkpoint store az://c: cannot write " in said


def test_accelerate_and_metrics(extra: Extra, tmp_path: Path) -> None:
    python = extra("accelerate", "metrics")
    page = (ROOT / "docs" / "accelerated.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) >= 5
    for code in blocks:
        runs(python, code, tmp_path)


def test_optuna(extra: Extra, tmp_path: Path) -> None:
    python = extra("optuna", "master")
    for sampler in ("tpe", "cmaes"):
        (tmp_path / "search.yaml").write_text(f"""
name: fit
entrypoint: "true"
hyperparameters: {{lr: {{type: double, minval: 0, maxval: 1}}, x: {{type: double, minval: 0, maxval: 1}}}}
searcher: {{name: optuna, sampler: {sampler}, metric: loss, max_trials: 20, max_length: 2}}
""")
        said = det_core(python, "search", "preview", "search.yaml", folder=tmp_path)
        assert "optuna, the smallest loss is best: 20 trials" in said


def test_postgres(extra: Extra, postgres_server: Postgres, tmp_path: Path) -> None:
    python, url = extra("postgres", "master"), postgres_server.new_schema()
    (tmp_path / "fit.yaml").write_text("""
name: fit
entrypoint: "true"
searcher: {name: single, metric: loss, max_length: 1}
max_restarts: 0
""")
    det_core(python, "master", "up", "--db", url, folder=tmp_path)
    try:
        det_core(python, "experiment", "create", "fit.yaml", folder=tmp_path)
        det_core(python, "experiment", "wait", "latest", folder=tmp_path)
    finally:
        det_core(python, "master", "down", folder=tmp_path)
    assert not processes_of(tmp_path)


def test_examples(extra: Extra, tmp_path: Path) -> None:
    python = extra("examples", "torch")
    said = run(python, EXAMPLES / "quickstart" / "train.py", "--epochs", "1", cwd=tmp_path).stdout
    assert "accuracy" in said
