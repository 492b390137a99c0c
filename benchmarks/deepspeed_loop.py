"""Speed of a DeepSpeedTrial's loop against the bare DeepSpeed loop: ZeRO 1 on two ranks, under our launcher.

The work and the turns are those of ``_loops.py``. It makes the environment of the frameworks, unless
``FRAMEWORKS_VENV`` names one.
"""

import os

from benchmarks import _loops
from benchmarks._bench import Args, Table, Tables, program, quick
from benchmarks._processes import frameworks

BOUND = 0.95
# ``torch_adam``, as DeepSpeed compiles its own Adam at its first use, for a minute.
TRIAL = """
import deepspeed as ds
from benchmarks._loops import BATCH, Bare, RANK, REPORT, Turns, data, loss_of, mlp
from det_core import pytorch
from det_core.pytorch import deepspeed
block, pairs = int(sys.argv[2]), int(sys.argv[3])
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}
def engine():
    model = mlp()
    return ds.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
class BareEngine(Bare):
    def make(self, torch):
        self.model = engine()
    def step(self, batch):
        loss = loss_of(self.model, [each.to(self.model.device) for each in batch])
        self.model.backward(loss)
        self.model.step()
        return loss
class Trial(deepspeed.DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.engine = context.wrap_model_engine(engine())
        self.turns = Turns(block, [BareEngine() for _ in range(2)])
    def build_training_data_loader(self):
        return pytorch.DataLoader(data(25_600), batch_size=BATCH, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(data(2), batch_size=1)
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = loss_of(self.engine, self.context.to_device(next(dataloader_iter)))
        self.engine.backward(loss)
        self.engine.step()
        self.turns.step()
        return {"loss": loss}
    def evaluate_batch(self, dataloader_iter):
        return {"loss": loss_of(self.engine, self.context.to_device(next(dataloader_iter)))}
with deepspeed.init(hparams={}) as context:
    trial = Trial(context)
    deepspeed.Trainer(trial, context).fit(
        max_length=pytorch.Batch(block * (pairs + 3)), reporting_period=pytorch.Batch(REPORT)
    )
    if RANK == 0:
        answer(trial.turns.found())
"""


def measure(args: Args) -> Tables:
    python = frameworks()
    title = f"steps per second of a DeepSpeedTrial on two ranks, of the bare loop's, {_loops.CORES} cores"
    table = Table(title, _loops.COLUMNS)
    if python is None:
        table.row("ZeRO 1: not installed")
    else:
        # DeepSpeed compiles its extension anew when another ninja comes first on PATH.
        env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch_extensions"),
               "PATH": f"{python.parent}:{os.environ['PATH']}"}  # fmt: skip
        found = _loops.blocks(TRIAL, "det_core", 50, quick(80, 2), ranks=2, python=python, env=env)
        _loops.row(table, "ZeRO 1", found, BOUND)
    yield table


if __name__ == "__main__":
    program(measure, __doc__)
