"""Reporting ten floats, by det_core and by its peers: what ``report_cost`` and ``report_rate`` both run.

Each reporter is a snippet that defines ``report(step)`` and ``close()`` for the dictionary ``metrics``. It is run in a
process of its own, in an empty folder, with the setting that costs the caller least: mlflow logs asynchronously,
wandb is offline, trackio has no dashboard to serve.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._peers import peers_python
from benchmarks._program import quick

PEERS: tuple[str, ...] = quick(("trackio", "wandb", "tensorboard", "mlflow"), ())
REQUIREMENTS = ("torch==2.13.0", "numpy", "trackio", "wandb", "tensorboard", "mlflow-skinny", "sqlalchemy", "alembic")
TIMEOUT = 900.0
"""Seconds for one reporter."""

_OURS = """
from det_core import core
context = core.init(tensorboard_mode=core.TensorboardMode.@MODE@)
context.__enter__()
train = context.train
def report(step):
    train.report_training_metrics(step, metrics)
def close():
    context.__exit__(None, None, None)
"""
REPORTERS = {
    "det_core": _OURS.replace("@MODE@", "MANUAL"),
    "det_core, TensorBoard AUTO": _OURS.replace("@MODE@", "AUTO"),
    "trackio": """
import trackio
trackio.init(project="bench", embed=False)
def report(step):
    trackio.log(metrics, step=step)
close = trackio.finish
""",
    "wandb": """
import wandb
run = wandb.init(project="bench", mode="offline", settings=wandb.Settings(silent=True))
def report(step):
    run.log(metrics, step=step)
close = run.finish
""",
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("events")
def report(step):
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
close = writer.close
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
run = mlflow.start_run()
def report(step):
    mlflow.log_metrics(metrics, step=step, synchronous=False)
def close():
    mlflow.flush_async_logging()
    mlflow.end_run()
""",
}
_METRICS = "metrics = {f'metric_{i}': i * 0.1234567 for i in range(10)}\n"


def measured(reporter: str, loop: str, *arguments: int) -> Any:
    """Run ``loop`` behind a reporter's snippet in a fresh process; what it passes to ``print_json`` comes back.

    Args:
        reporter: a key of :data:`REPORTERS`.
        loop: code that calls ``report(step)`` and ``close()``, with ``arguments`` as the list ``N``.
        arguments: numbers for the loop.
    """
    ours = reporter.startswith("det_core")
    python = Path(sys.executable) if ours else peers_python(*REQUIREMENTS)
    head = "import json, sys, time\nN = [int(a) for a in sys.argv[2:]]\n"
    result = "def print_json(value):\n    open(sys.argv[1], 'w').write(json.dumps(value))\n"
    code = head + result + _METRICS + REPORTERS[reporter] + loop
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        environment = {**os.environ, "DET_CORE_HOME": folder, "TRACKIO_DIR": folder, "HF_HUB_OFFLINE": "1"}
        environment.update(WANDB_DIR=folder, GIT_PYTHON_REFRESH="quiet", PYTHONWARNINGS="ignore")
        done = subprocess.run(
            [python, "-c", code, answer, *map(str, arguments)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        if done.returncode or not answer.exists():
            raise RuntimeError(f"{reporter} ended with status {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(answer.read_text())
