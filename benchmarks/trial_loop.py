"""Speed of a PyTorchTrial's loop against the bare loop, beside determined's; and the time to the first batch.

The work and the turns are those of ``_loops.py``: epochs of 400 steps in one process, a report every 100, with the
defaults and the extra ``tensorboard`` installed. The bare script and ours of the second table end at their first batch.
"""

import functools
import time

from benchmarks import _loops
from benchmarks._bench import PEERS, Args, Table, Tables, at_most, program, quick
from benchmarks._processes import DETERMINED, TORCH, answer, peers
from benchmarks._turns import Figures, alternate, median

TRIAL = """
import importlib
from benchmarks._loops import BATCH, RANK, REPORT, Bare, Turns, data, loss_of, mlp
import torch
package, block, pairs, step_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
pytorch = importlib.import_module(package + ".pytorch")
class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(mlp())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.turns = Turns(block, [Bare(step_ms=step_ms) for _ in range(2)]) if block else None
    def build_training_data_loader(self):
        return pytorch.DataLoader(data(25_600), batch_size=BATCH, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(data(1), batch_size=1)
    def train_batch(self, batch, epoch_idx, batch_idx):
        if not block:
            answer(None)
            os._exit(0)
        loss = loss_of(self.model, batch, step_ms)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.turns.step()
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"loss": loss_of(self.model, batch)}
searcher = {"name": "single", "metric": "loss", "smaller_is_better": True, "max_length": {"batches": 1}}
its = {} if package == "det_core" else {"exp_conf": {"searcher": searcher}}
with pytorch.init(hparams={}, **its) as context:
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(block * (pairs + 3) or 1), reporting_period=pytorch.Batch(REPORT),
        **({"checkpoint_policy": "none"} if its else {}),
    )
    if RANK == 0:
        answer(trial.turns.found())
"""
BARE = """
from benchmarks._loops import Bare
next(Bare().batches)
answer(None)
os._exit(0)
"""


def measure(args: Args) -> Tables:
    table = Table(f"steps per second of a PyTorchTrial, of the bare loop's, {_loops.CORES} cores", _loops.COLUMNS)
    run = functools.partial(_loops.blocks, TRIAL)
    _loops.row(table, "one process", run("det_core", 400, quick(30, 2)), 0.93)
    _loops.row(table, "two DDP ranks", run("det_core", 50, quick(80, 2), ranks=2), 0.93)
    _loops.row(table, "a 20 ms step", run("det_core", 50, quick(10, 2), 20.0), 0.99)
    if PEERS:
        python = peers(DETERMINED, TORCH, "tensorboard", "numpy")
        _loops.row(table, f"{DETERMINED}, one process", run("determined", 400, 10, python=python))
    yield table
    contenders = {"bare": functools.partial(start, BARE), "ours": functools.partial(start, TRIAL, "det_core", 0, 0, 0)}
    found = alternate(contenders, args.rounds)
    bare = median(found["bare"], "s")
    ours = median(found["ours"], "s")
    table = Table(f"from the start of a process to the first batch, medians of {args.rounds}", ["s"])
    table.row("a bare script", bare)
    table.row("a PyTorchTrial", ours, bound=at_most(ours, 1.1 * bare + 0.05))
    yield table


def start(code: str, *arguments: object) -> Figures:
    """Seconds of a process that ends at its first batch."""
    began = time.perf_counter()
    # It looks for the end of a process every 20 ms, and so is late by as much, for both contenders alike.
    answer(code, *arguments)
    return {"s": time.perf_counter() - began}


if __name__ == "__main__":
    program(measure, __doc__, rounds=10)
