"""What a trial's checkpoint costs in a folder of 2,500 scripts, against one in an empty folder.

Each fit is a process of its own, in turn in one folder and the other: a tiny trial that saves a checkpoint after each
batch. The code is read for the first one, which is told apart; of the processes the median is taken.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._program import options, quick, status
from benchmarks._table import print_table

BOUND = 1.2
FILES = 2500
ROUNDS = quick(5, 1)
SAVES = quick(40, 3)
CODE = """
import json, sys, time
import torch
from det_core import pytorch

SAVES = int(sys.argv[1])

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
    def loader(self): return pytorch.DataLoader([torch.ones(1)] * 4, batch_size=2)
    build_training_data_loader = build_validation_data_loader = loader
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.context.backward(self.model(batch).sum())
        self.context.step_optimizer(self.optimizer)
        return {}
    def evaluate_batch(self, batch): return {"x": 1.0}
    def build_callbacks(self):
        return {"clock": Clock()}

class Clock(pytorch.PyTorchCallback):
    def on_training_workload_end(self, avg_metrics, batch_metrics): took.append(-time.perf_counter())
    def on_checkpoint_upload_end(self, uuid): took[-1] += time.perf_counter()

took = []
with pytorch.init(hparams={}) as context:
    pytorch.Trainer(Trial(context), context).fit(
        max_length=pytorch.Batch(SAVES), checkpoint_period=pytorch.Batch(1), checkpoint_policy="none"
    )
print("RESULT", json.dumps([each for each in took if each > 0]))
"""


def fit(folder: Path, home: Path) -> tuple[float, float]:
    """Milliseconds of the first checkpoint, and the median of all: a disk that syncs slowly now and then is no part."""
    environment = {**os.environ, "DET_CORE_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(SAVES)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    took = json.loads(next(line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")))
    return 1e3 * took[0], 1e3 * statistics.median(took)


def main() -> int:
    """Print the table; 1 if the bound is not met."""
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"empty": Path(scratch) / "empty", "scripts": Path(scratch) / "scripts"}
        for folder in folders.values():
            folder.mkdir()
        for number in range(FILES):
            (folders["scripts"] / f"script{number}.py").write_text("print('hello')\n" * 20)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in folders}
        for turn in range(ROUNDS):
            for name in sorted(folders, reverse=bool(turn % 2)):
                took[name].append(fit(folders[name], Path(scratch) / "home"))
    first, each = ({name: statistics.median(t[i] for t in took[name]) for name in took} for i in range(2))
    ratio = each["scripts"] / each["empty"]
    rows = [
        ["an empty folder", first["empty"], each["empty"], None, None, None],
        [f"a folder of {FILES:,} scripts", first["scripts"], each["scripts"], ratio, BOUND, ratio <= BOUND],
    ]
    title = f"A bare trial's checkpoint, ms, median of {ROUNDS} processes that save {SAVES} times"
    print_table(title, ["working directory", "the first", "each", "times empty", "bound", "met"], rows)
    return status(ratio > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
