"""What the accelerated Trainer's loop keeps of the bare loop's speed, beside accelerate's own loop and
pytorch-accelerated; and what its import costs.

The model, the data and the blocks in turn are those of ``trial_loop``, with 500 batches an epoch and the default
callbacks. The peers run in an environment of their own, against the same bare loop.
Run it with ``python -m benchmarks.accelerated_loop``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table
from benchmarks.trial_loop import HEADINGS, blocks, judged

SCRIPT = Path(__file__).with_name("_accelerated.py")
TRIAL = Path(__file__).with_name("_trial.py")
IMPORT_MS = 60.0
PEERS = ("accelerate==1.15.0", "pytorch-accelerated==0.1.61", "torch==2.13.0", "numpy")

PEER_HEAD = """
import statistics, sys, time
sys.argv[1:] = ["500", "0", "0"]
exec(open(PATH).read().split("class Trial(")[0].replace("from det_core import pytorch", ""))
dataset, model, ratios = data(32_000), mlp(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bare = Bare(0, 1)
bare.run(500)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def epoch():
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT == 0:
            loss.item()
epoch()
for _ in range(12):
    began = time.perf_counter(); epoch(); took = time.perf_counter() - began
    ratios.append(bare.run(500) / took)
print("RESULT", statistics.median(ratios))
"""
ORIGINAL = """
from pytorch_accelerated import Trainer
class Timed(Trainer):
    ends = []
    def training_run_epoch_end(self):
        super().training_run_epoch_end()
        now = time.perf_counter()
        if self.ends:
            ratios.append(bare.run(500) / (now - self.ends[-1]))
        self.ends.append(time.perf_counter())
Timed(model, F.cross_entropy, optimizer).train(
    dataset, num_epochs=13, per_device_batch_size=BATCH, train_dataloader_kwargs={"num_workers": 0})
print("RESULT", statistics.median(ratios))
"""


ALONE = """
import sys, time
kind, epochs = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = ["500", "0", "0"]
from benchmarks._trial import BATCH, Bare, F, data, mlp, torch
from det_core.accelerated import Trainer

if kind == "bare":
    bare = Bare(0, 1)
    bare.run(500)
    print("RESULT", bare.run(500 * epochs))
else:
    model, dataset = mlp(), data(32_000)
    trainer = Trainer(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01))
    for each in (1, epochs):
        began = time.perf_counter()
        trainer.train(dataset, each, per_device_batch_size=BATCH, train_dataloader_kwargs={"num_workers": 0})
    print("RESULT", time.perf_counter() - began)
"""
"""The second training of a process, which has it for itself: in turns the two loops cool each other's caches."""


def alone(kind: str, epochs: int) -> float:
    """Seconds of so many epochs of 500 steps, the least of three processes."""
    took = []
    for _ in range(quick(3, 1)):
        done = subprocess.run(
            [sys.executable, "-c", ALONE, kind, str(epochs)], env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        took.append(float(done.stdout.split()[-1]))
    return min(took)


def peer(code: str) -> float:
    """A peer's steps per second, of the bare loop's."""
    python = peers_python(*PEERS)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-c", PEER_HEAD.replace("PATH", repr(str(TRIAL))) + code], cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
    lines = [line.split()[-1] for line in done.stdout.splitlines() if "RESULT" in line]
    if not lines:
        raise RuntimeError(f"the peer ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(lines[-1])


def import_ms(python: str, module: str) -> float:
    """Milliseconds of an import in a process that has imported torch; the first of ten fills the caches."""
    code = f"import time, torch; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    took = [
        float(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()[-1])
        for _ in range(quick(10, 2))
    ]
    return 1000 * statistics.median(took[1:])


def main() -> int:
    """Print the tables; the number of bounds that are not met."""
    parser = options(__doc__)
    parser.add_argument("--no-peer", action="store_true", help="without the peers, which get a venv of their own")
    with_peer = not (parser.parse_args().no_peer or QUICK)
    rows: list[list[Any]] = []
    missed, one = 0, 0.0
    for name, bound, measured in (
        ("one process", 0.93, lambda: blocks(500, quick(30, 2), script=SCRIPT)),
        ("two DDP ranks", 0.93, lambda: blocks(50, quick(80, 2), ranks=2, script=SCRIPT)),
        (
            "a 20 ms step, metrics every 50, a checkpoint every 200",
            0.98,
            lambda: blocks(50, quick(20, 2), 20.0, script=SCRIPT),
        ),
    ):
        found = measured()
        row, met = judged(name, bound, found)
        one = one or row[1]
        missed += not met
        rows.append([*row, statistics.median(found["cpu"])])
    if with_peer:
        loop, original = peer(ACCELERATE), peer(ORIGINAL)
        missed += one < 1.4 * original
        rows.append(["accelerate's loop, one process", loop, *[None] * 7])
        rows.append(["pytorch-accelerated, one process", original, *[None] * 7])
        rows.append(["ours : pytorch-accelerated", one / original, *[None] * 4, ">= 1.4", one >= 1.4 * original, None])
    many, few = quick(12, 2), quick(2, 1)
    hot = (alone("bare", many) - alone("bare", few)) / (alone("ours", many) - alone("ours", few))
    whole = alone("bare", quick(4, 1)) / alone("ours", quick(4, 1))
    for name, ratio, bound in (
        ("a second train() in a process of its own, 12 epochs less 2", hot, 0.93),
        ("the same, 4 epochs from call to return", whole, 0.88),
    ):
        missed += ratio < bound
        rows.append([name, ratio, *[None] * 4, f">= {bound}", ratio >= bound, None])
    print_table(
        f"steps per second of the accelerated Trainer, of the bare loop's, {len(os.sched_getaffinity(0))} cores",
        [*HEADINGS, "CPU ratio"], rows,
    )  # fmt: skip
    ours = import_ms(sys.executable, "det_core.accelerated")
    missed += ours > IMPORT_MS
    imports: list[list[Any]] = [["det_core.accelerated", ours, f"<= {IMPORT_MS:g}", ours <= IMPORT_MS]]
    if with_peer:
        imports.append(["pytorch_accelerated", import_ms(str(peers_python(*PEERS)), "pytorch_accelerated"), "", None])
    print_table("milliseconds of an import once torch is imported, medians of 9", ["", "ms", "bound", "met"], imports)
    return missed


if __name__ == "__main__":
    raise SystemExit(status(main()))
