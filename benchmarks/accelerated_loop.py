"""Speed of the accelerated Trainer's loop against the bare loop, beside accelerate's loop and pytorch-accelerated.

Also the cost of its import.

The work and the turns are those of ``_loops.py``, with 500 batches an epoch and the default callbacks; the peers run in
an environment of their own, against the same bare loop. Two rows are of a process that a training has for itself, as in
turns the two loops cool each other's caches: its second training, of many epochs less few, and whole.
"""

import functools
from pathlib import Path

from benchmarks import _loops
from benchmarks._bench import PEERS, Args, Table, Tables, at_least, at_most, program, quick
from benchmarks._processes import TORCH, answer, peers
from benchmarks._turns import alternate, best, median

RIVALS = ("accelerate==1.15.0", "pytorch-accelerated==0.1.61", TORCH, "numpy")
FASTER = 1.4
IMPORT_MS = 60.0
"""Bounds: times pytorch-accelerated's speed, and milliseconds of the import."""
HEAD = """
import importlib
from benchmarks._loops import BATCH, Bare, RANK, RANKS, REPORT, Turns, clocks, data, loss_of, mlp, since
import torch, torch.nn.functional as F
package, block, pairs, step_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
RECORDS = 32_000
def of(module):
    return torch.optim.SGD(module.parameters(), lr=0.01)
def bare():
    return Bare(RECORDS, step_ms)
"""
TRAINER = HEAD + """
from contextlib import nullcontext
Trainer = importlib.import_module(package).Trainer
class Measured(Trainer):
    def optimizer_zero_grad(self):
        super().optimizer_zero_grad()
        turns.step()
    def calculate_train_batch_loss(self, batch):
        if step_ms:
            time.sleep(step_ms / 1e3)
        return super().calculate_train_batch_loss(batch)
managed, options = nullcontext(), {}
if step_ms:
    from det_core import core
    managed = core.init(distributed=core.DistributedContext.detect())
    options = {"report_every": 50, "checkpoint_every": 200}
with managed:
    model = mlp()
    trainer = (Measured if block else Trainer)(model, F.cross_entropy, of(model))
    train = lambda epochs: trainer.train(
        data(RECORDS), epochs, per_device_batch_size=BATCH, train_dataloader_kwargs={"num_workers": 0}, **options)
    if block:
        turns = Turns(block, [bare(), bare()])
        train(-(-block * (pairs + 3) // (RECORDS // BATCH // RANKS)))
        found = turns.found()
    else:
        train(1)
        began = clocks()
        train(pairs)
        found = {"s": since(began)[0]}
if RANK == 0:
    answer(found)
"""  # fmt: skip
"""The Trainer in turns; with blocks of no length, its second training alone, of so many epochs."""
ALONE = HEAD + """
loop = bare()
loop.run(500)
answer({"s": loop.run(500 * pairs)[0]})
"""  # fmt: skip
ACCELERATE = HEAD + """
from accelerate import Accelerator
accelerator, model = Accelerator(), mlp()
loader = torch.utils.data.DataLoader(data(RECORDS), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, of(model), loader)
turns = Turns(block, [bare(), bare()])
while len(turns.ours) <= pairs:
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT == 0:
            loss.item()
        turns.step()
answer(turns.found())
"""  # fmt: skip
# torch before the clock: every script of a Trainer's imports it, and it would hide what the package adds.
IMPORT = """
import importlib, torch
began = time.perf_counter()
importlib.import_module(sys.argv[1])
answer({"ms": 1e3 * (time.perf_counter() - began)})
"""
OURS = "det_core.accelerated"


def measure(args: Args) -> Tables:
    title = f"steps per second of the accelerated Trainer, of the bare loop's, {_loops.CORES} cores"
    table = Table(title, _loops.COLUMNS)
    run = functools.partial(_loops.blocks, TRAINER)
    one = _loops.row(table, "one process", run(OURS, 500, quick(30, 2)), 0.93)
    _loops.row(table, "two DDP ranks", run(OURS, 50, quick(80, 2), ranks=2), 0.93)
    name = "a 20 ms step, metrics every 50, a checkpoint every 200"
    _loops.row(table, name, run(OURS, 50, quick(20, 2), 20.0), 0.98)
    python: Path | None = peers(*RIVALS) if PEERS else None
    if python:
        found = _loops.blocks(ACCELERATE, "accelerate", 500, 12, python=python)
        _loops.row(table, "accelerate's loop, one process", found)
        original = _loops.row(table, RIVALS[1], run("pytorch_accelerated", 500, 12, python=python))
        table.row("ours : pytorch-accelerated", one / original, bound=at_least(one / original, FASTER))
    second_training(table)
    yield table
    table = Table(f"import once torch is imported, ms, medians of {args.rounds}", ["ms"])
    modules = {OURS: functools.partial(answer, IMPORT, OURS)}
    if python:
        modules[RIVALS[1]] = functools.partial(answer, IMPORT, "pytorch_accelerated", python=python)
    for name, found in alternate(modules, args.rounds).items():
        ms = median(found, "ms")
        table.row(name, ms, bound=at_most(ms, IMPORT_MS) if name == OURS else None)
    yield table


def second_training(table: Table) -> None:
    """Add the rows of trainings that have a process for themselves, the least of seven each: such a process takes up to
    half as long again beside others."""
    many, few, some = quick((12, 2, 4), (2, 1, 2))
    contenders = {}
    for epochs in {many, few, some}:
        contenders[f"bare {epochs}"] = functools.partial(answer, ALONE, "none", 500, epochs, 0)
        contenders[f"ours {epochs}"] = functools.partial(answer, TRAINER, OURS, 0, epochs, 0)
    s = {name: best(each, "s") for name, each in alternate(contenders, quick(7, 1)).items()}
    # The difference leaves out what a training does once, at its start and at its end.
    hot = (s[f"bare {many}"] - s[f"bare {few}"]) / (s[f"ours {many}"] - s[f"ours {few}"])
    whole = s[f"bare {some}"] / s[f"ours {some}"]
    name = f"a second train() in a process of its own, {many} epochs less {few}"
    table.row(name, hot, bound=at_least(hot, 0.93))
    table.row(f"the same, {some} epochs from call to return", whole, bound=at_least(whole, 0.88))


if __name__ == "__main__":
    program(measure, __doc__, rounds=9)
