"""What a PyTorchTrial's loop keeps of the bare loop's speed, and the original's; and the time to the first batch.

A tiny model, so that what is ours shows: 64 to 128 to 10, batches of 64 fetched item by item, epochs of 400 steps, a
report every 100, with the defaults and the extra ``tensorboard`` installed. Blocks of ours and of two bare loops take
turns in the same processes; the two bare loops against each other tell how far the machine can be believed.
Run it with ``python -m benchmarks.trial_loop``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

SCRIPT = Path(__file__).with_name("_trial.py")
LAUNCHER = ["-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2"]
BELIEVED = (0.97, 1.03)
"""Where bare : bare must lie for a row to count."""

ORIGINAL = """
import statistics, sys, time
import torch, torch.nn.functional as F
import determined as det
from determined import pytorch
sys.argv[1:] = ["400", "0", "0"]
exec(open(PATH).read().split("class Trial(")[0].replace("from det_core import pytorch", ""))
class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(mlp())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.bare, self.began, self.ratios = Bare(0, 1), None, []
    def build_training_data_loader(self): return pytorch.DataLoader(data(), batch_size=BATCH, shuffle=True)
    def build_validation_data_loader(self): return pytorch.DataLoader(data(), batch_size=BATCH)
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if (batch_idx + 1) % 400 == 0: self.block()
        return {"loss": loss}
    def block(self):
        ours = None if self.began is None else time.perf_counter() - self.began
        bare = self.bare.run(400)
        if ours: self.ratios.append(bare / ours)
        self.began = time.perf_counter()
    def evaluate_full_dataset(self, data_loader): return {"loss": 0.0}
with pytorch.init(hparams={}, exp_conf={"searcher": {"metric": "loss"}}) as context:
    trial = Trial(context)
    batch = pytorch.Batch
    pytorch.Trainer(trial, context).fit(max_length=batch(4400), reporting_period=batch(100), checkpoint_policy="none")
print("RESULT", statistics.median(trial.ratios))
"""


def blocks(
    block: int, pairs: int, step_ms: float = 0.0, *, ranks: int = 1, script: Path = SCRIPT,
    python: str = sys.executable, env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """What ``_trial.py``, or another script of its kind, prints."""
    with tempfile.TemporaryDirectory() as home:
        command = [python, *(LAUNCHER if ranks > 1 else []), str(script), str(block), str(pairs), str(step_ms)]
        env = {**os.environ, "DET_CORE_HOME": home, "OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(command, cwd=home, env={**env, "PYTHONPATH": str(SCRIPT.parent.parent)},
                              capture_output=True, text=True, timeout=1800)  # fmt: skip
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode or not lines:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def original() -> float:
    """The original's steps per second, of the bare loop's."""
    python = peers_python("determined==0.38.1", "torch==2.13.0", "tensorboard", "numpy")
    with tempfile.TemporaryDirectory() as folder:
        code = ORIGINAL.replace("PATH", repr(str(SCRIPT)))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([python, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=1800)
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(f"the original ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(lines[-1])


HEAD = """
import os, sys, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
def mlp(): return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
"""
BARE_START = (
    HEAD
    + """
model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, batch_size=64, shuffle=True):
    os._exit(0)
"""
)
OUR_START = (
    HEAD
    + """
from det_core import pytorch
class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(mlp())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
    def build_training_data_loader(self): return pytorch.DataLoader(data, batch_size=64, shuffle=True)
    def build_validation_data_loader(self): return pytorch.DataLoader(data, batch_size=64)
    def train_batch(self, batch, epoch_idx, batch_idx): os._exit(0)
    def evaluate_batch(self, batch): return {}
with pytorch.init(hparams={}) as context:
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(1))
"""
)


def start_seconds(rounds: int = quick(9, 1)) -> tuple[float, float]:
    """Seconds from the start of a process to its first batch, at which it ends: ours, and a bare script's; medians."""
    took: dict[str, list[float]] = {OUR_START: [], BARE_START: []}
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "DET_CORE_HOME": home, "PYTHONPATH": str(SCRIPT.parent.parent)}
        for _ in range(rounds + 1):
            for code, times in took.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], cwd=home, env=env, check=True, capture_output=True)
                times.append(time.perf_counter() - began)
    return statistics.median(took[OUR_START][1:]), statistics.median(took[BARE_START][1:])


HEADINGS = ["", "ratio", "quartiles", "A/A", "bare, µs a step", "pairs", "bound", "met"]


def judged(name: str, bound: float, found: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """A row of the table, and whether its bound is met."""
    ratio, again = statistics.median(found["ratios"]), statistics.median(found["again"])
    quarters = statistics.quantiles(found["ratios"])
    met = ratio >= bound
    row = [
        name, ratio, f"{quarters[0]:.3f} to {quarters[2]:.3f}", again, found["micros"], len(found["ratios"]),
        f">= {bound}", met if BELIEVED[0] <= again <= BELIEVED[1] else "A/A is off",
    ]  # fmt: skip
    return row, met


def main() -> int:
    """Print the table; the number of bounds that are not met."""
    parser = options(__doc__)
    parser.add_argument("--no-peer", action="store_true", help="without the peers, which get a venv of their own")
    with_peer = not (parser.parse_args().no_peer or QUICK)
    rows, missed = [], 0
    for name, bound, measure in (
        ("one process", 0.93, lambda: blocks(400, quick(30, 2))),
        ("two DDP ranks", 0.93, lambda: blocks(50, quick(80, 2), ranks=2)),
        ("a 20 ms step", 0.99, lambda: blocks(50, quick(10, 2), 20.0)),
    ):
        row, met = judged(name, bound, measure())
        missed += not met
        rows.append(row)
    if with_peer:
        rows.append(["the original, one process", original(), "", None, None, None, "", None])
    print_table(
        f"steps per second of a PyTorchTrial, of the bare loop's, {len(os.sched_getaffinity(0))} cores",
        HEADINGS, rows,
    )  # fmt: skip
    ours, bare = start_seconds()
    bound = 1.1 * bare + 0.05
    missed += ours > bound
    print_table(
        "seconds from the start of a process to the first batch, medians of 9", ["", "seconds", "bound", "met"],
        [["a bare script", bare, "", None], ["a PyTorchTrial", ours, f"<= {bound:.2f}", ours <= bound]],
    )  # fmt: skip
    return missed


if __name__ == "__main__":
    raise SystemExit(status(main()))
