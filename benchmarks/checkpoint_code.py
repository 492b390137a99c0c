"""Cost of a trial's checkpoint in a directory of 2,500 scripts, against one in an empty directory.

Each fit is a process of its own: a tiny trial that saves a checkpoint after each batch. The code is read for the first
one, which has its own row; of the others the median counts, which leaves out a disk that syncs slowly now and then.
"""

import functools
import tempfile
from pathlib import Path

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._processes import answer
from benchmarks._turns import alternate, median

BOUND = 1.2
FILES = 2500
SAVES = quick(40, 3)
CODE = """
import statistics
os.chdir(sys.argv[1])
sys.path.insert(0, "")
import torch
from det_core import pytorch
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
        max_length=pytorch.Batch(int(sys.argv[2])), checkpoint_period=pytorch.Batch(1), checkpoint_policy="none"
    )
took = [each * 1e3 for each in took if each > 0]
answer({"first": took[0], "each": statistics.median(took)})
"""


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"an empty folder": Path(scratch, "empty"), f"a folder of {FILES:,} scripts": Path(scratch, "full")}
        empty, full = folders
        for folder in folders.values():
            folder.mkdir()
        for number in range(FILES):
            (folders[full] / f"script{number}.py").write_text("print('hello')\n" * 20)
        found = alternate({name: functools.partial(answer, CODE, folder, SAVES) for name, folder in folders.items()},
                          args.rounds)  # fmt: skip
    title = f"a bare trial's checkpoint, ms, median of {args.rounds} processes that save {SAVES} times"
    table = Table(title, ["the first", "each", "times empty"])
    times = median(found[full], "each") / median(found[empty], "each")
    table.row(empty, median(found[empty], "first"), median(found[empty], "each"))
    table.row(full, median(found[full], "first"), median(found[full], "each"), times, bound=at_most(times, BOUND))
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=5)
