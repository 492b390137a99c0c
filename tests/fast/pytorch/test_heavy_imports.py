"""Imports of a trial up to its first batch: nothing heavy beyond those of a bare script."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

HEAVY = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "torch.profiler",
    "torch.utils.tensorboard", "tensorboard", "tqdm", "sympy", "requests", "fsspec", "zmq", "pydantic", "pandas",
    "sqlite3", "rich", "deepspeed",
)  # fmt: skip
CODE = """
import json, sys, os, torch
loader = torch.utils.data.DataLoader([torch.ones(1)] * 4, batch_size=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()
    break
bare = set(sys.modules)
from det_core import pytorch
import det_core.pytorch.deepspeed

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
    def loader(self): return pytorch.DataLoader([torch.ones(1)] * 4, batch_size=2)
    build_training_data_loader = build_validation_data_loader = loader
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 1:
            print(json.dumps(sorted(set(sys.modules) - bare)), flush=True)
            os._exit(0)
        self.context.backward(self.model(batch).sum())
        self.context.step_optimizer(self.optimizer)
        return {"loss": 1.0}
    def evaluate_batch(self, batch): return {"x": 1.0}

with pytorch.init(hparams={}) as context:
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(3))
"""


def test_nothing_heavy_before_the_first_report() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    more: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert "det_core.pytorch.deepspeed" in more
    assert [name for name in more if name.startswith(tuple(f"{h}." for h in HEAVY)) or name in HEAVY] == []


def test_without_torch_the_import_says_how_to_install_it() -> None:
    code = """
import sys
class Hiding:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import det_core.pytorch
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert "MissingExtra: a trial or a Trainer needs torch, which is not installed. Install it: pip install" in last
