"""Trials of the real DeepSpeed on two processes: the acceptance cases by their numbers, mistakes, entrypoints."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import TESTS, warm
from support.frameworks import FRAMEWORKS, PYTHON, WARM, variables
from support.launcher import launched
from support.ranks import running

HEAD = """
from pathlib import Path
import torch
from det_core import core, pytorch
from det_core.errors import CheckpointError, InvalidExperimentException
from det_core.pytorch import Batch, Epoch, deepspeed
from det_core.pytorch.deepspeed import ModelParallelUnit
from support.engine_trials import Pipelined, Tiny, fit, say
"""


def given(folder: Path) -> dict[str, str]:
    """Return the variables of every process."""
    return {**variables(), "DET_CORE_HOME": str(folder / "home"), "PYTHONPATH": str(TESTS)}


def said(output: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r"^SAID (.*)$", output, re.MULTILINE)]


def on_two(folder: Path, code: str, *, status: int = 0, **env: str) -> tuple[list[list[dict[str, Any]]], str]:
    """Run code on two ranks; what each of them has said, and all that they have printed."""
    with running(HEAD + code, 2, folder, env={**given(folder), **env}, kind=WARM) as ranks:
        statuses = ranks.wait()
    outputs = [ranks.output(rank) for rank in range(2)]
    assert statuses == [status, status], outputs
    return [said(output) for output in outputs], "".join(outputs)


def test_case_60_micro_batches_of_a_batch_have_its_index(tmp_path: Path) -> None:
    found, _ = on_two(tmp_path, """
class Trial(Tiny):
    accumulation, records = 2, 32  # an epoch of 4

trial = fit(Trial, 3, validation_period=Batch(2))
ends = [e[2] for e in trial.events if e[0] == "on_training_workload_end"]
say(calls=trial.calls, epoch_len=trial.context._epoch_len, rows=[len(rows) for rows in ends],
    validations=[e[0] for e in trial.events].count("on_validation_end"), steps=trial.engine.global_steps)

class Whole(Trial):
    def __init__(self, context):
        super().__init__(context)
        context.disable_auto_grad_accumulation()
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        for _ in range(self.context.get_num_micro_batches_per_slot()):
            found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return found
trial = fit(Whole, 3, validation_period=Batch(2))
ends = [e[2] for e in trial.events if e[0] == "on_training_workload_end"]
say(calls=trial.calls, rows=[len(rows) for rows in ends], steps=trial.engine.global_steps)
""")  # fmt: skip
    expected = {"calls": [0, 0, 1, 1, 2, 2], "epoch_len": 4, "rows": [4, 2], "validations": 2, "steps": 3}
    assert [each[0] for each in found] == [expected, expected]
    assert found[0][1] == {"calls": [0, 0, 1, 1, 2, 2], "rows": [2, 1], "steps": 3}


def test_case_61_reports_checkpoints_and_the_next_micro_batch(tmp_path: Path) -> None:
    code = """
class Trial(Tiny):
    zero, accumulation, records = 1, 2, 32
    def metrics(self, loss):
        return {"loss": loss, "rank": self.context.distributed.rank}

trial = fit(Trial, LENGTH, {"name": "case", "resume": "latest"})
ends = [e for e in trial.events if e[0] == "on_training_workload_end"]
say(rank=ends[-1][1]["rank"], rows=[row["rank"] for row in ends[-1][2]], seen=trial.seen, calls=trial.calls)
"""
    first, _ = on_two(tmp_path, code.replace("LENGTH", "3"))
    assert [each[0]["rank"] for each in first] == [0.5, 0.5] and first[0][0]["rows"] == [0.5] * 6
    (folder,) = tmp_path.glob("home/runs/*/checkpoints/*/trial_state.json")
    names = {path.name for path in folder.parent.iterdir()}
    assert {
        "det_state_dict_rank0.pth",
        "det_state_dict_rank1.pth",
        "load_data.json",
        "model0",
        "latest",
        "code",
    } <= names
    assert {"trial_state.json", "trial_state.pkl", "metadata.json"} <= names
    assert json.loads((folder.parent / "load_data.json").read_text())["trial_type"] == "DeepSpeedTrial"
    assert len(list(folder.parent.glob("model0/*_optim_states.pt"))) == 2
    second, _ = on_two(tmp_path, code.replace("LENGTH", "5"))
    assert second[0][0]["calls"] == [3, 3, 4, 4]
    for rank, each in enumerate(second):
        stream = [[float(4 * n + 2 * rank), float(4 * n + 2 * rank + 1)] for n in [*range(8), *range(8)]]
        assert first[rank][0]["seen"] + each[0]["seen"] == stream[:10]


def test_case_62_units_and_ranks_that_read_no_data(tmp_path: Path) -> None:
    found, _ = on_two(tmp_path, """
rank = None
class Trial(Tiny):
    def __init__(self, context):
        global rank
        rank = context.distributed.rank
        try:
            context.set_mpu(ModelParallelUnit(0, 1, True, True))
        except InvalidExperimentException as e:
            say(before=str(e))
        super().__init__(context)
        context.set_mpu(ModelParallelUnit(0, 1, rank == 1, rank == 1))
        try:
            context.set_mpu(ModelParallelUnit(0, 1, True, True))
        except InvalidExperimentException as e:
            say(twice=str(e))
        self.iterators = set()
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.iterators.add(dataloader_iter is None)
        batch = next(dataloader_iter) if dataloader_iter is not None else [torch.ones(2, 1), torch.ones(2, 1)]
        loss = self.loss(batch)
        self.engine.backward(loss)
        self.engine.step()
        return {"value": 7.0} if rank == 1 else "whatever"
    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.iterators.add(dataloader_iter is None)
        return {"error": 2.0 + batch_idx} if dataloader_iter is not None else None

trial = fit(Trial, 3)
ends = {e[0]: e[1] for e in trial.events if len(e) > 1}
say(iterators=list(trial.iterators), training=ends["on_training_workload_end"], validation=ends["on_validation_end"],
    epoch_len=trial.context._epoch_len)
""")  # fmt: skip
    for rank, (before, twice, end) in enumerate(found):
        assert "no engine is wrapped" in before["before"] and "set_mpu() called twice" in twice["twice"]
        assert end["iterators"] == [rank == 0] and end["training"] == {"value": 7.0}
        assert end["validation"] == {"error": 3.5} and end["epoch_len"] == 8


def test_a_pipeline_reads_data_at_its_ends(tmp_path: Path) -> None:
    found, _ = on_two(tmp_path, """
class Trial(Pipelined):
    accumulation, records, validation_records = 2, 32, 14  # an epoch of 8; 7 validation batches, of which 6 are taken
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        assert dataloader_iter is not None, "two stages: both are ends"
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

trial = fit(Trial, 3)
context, unit = trial.context, trial.context._mpu
ends = {e[0]: e for e in trial.events if len(e) > 1}
say(calls=trial.calls, pipeline=context.use_pipeline_parallel, epoch_len=context._epoch_len,
    unit=[unit.data_parallel_rank, unit.data_parallel_world_size, unit.should_report_metrics],
    rows=[list(row) for row in ends["on_training_workload_end"][2]], sizes=[context.get_global_batch_size(),
    context.get_per_slot_batch_size(), context.get_train_micro_batch_size_per_gpu()], steps=trial.engine.global_steps,
    evaluated=len(ends["on_validation_epoch_end"][1]))
""")  # fmt: skip
    expected = {
        "calls": [0, 1, 2], "pipeline": True, "epoch_len": 8, "unit": [0, 1, True], "rows": [["loss"]] * 3,
        "sizes": [4, 4, 2], "steps": 3, "evaluated": 3,
    }  # fmt: skip
    assert [each[0] for each in found] == [expected, expected]


def test_ranks_that_evaluate_all_together(tmp_path: Path) -> None:
    """Five validation batches on two ranks: two each, since ZeRO 3 exchanges parameters in every forward pass."""
    found, output = on_two(tmp_path, """
class Trial(Tiny):
    zero, records, validation_records = 3, 18, 10
    def evaluate_batch(self, dataloader_iter):
        super().evaluate_batch(dataloader_iter, 0)
        return {"error": float(self.context.distributed.rank)}
    def evaluation_reducer(self):
        return pytorch.Reducer.SUM

trial = fit(Trial, 2)
say(sum={e[0]: e[1] for e in trial.events if len(e) > 1}["on_validation_end"]["error"],
    epoch_len=trial.context._epoch_len)
class Full(Tiny):
    evaluate_batch = deepspeed.DeepSpeedTrial.evaluate_batch
    def evaluate_full_dataset(self, data_loader):
        return {"batches": len(list(data_loader))}
trial = fit(Full, 1)
say(full={e[0]: e[1] for e in trial.events if len(e) > 1}["on_validation_end"])
""")  # fmt: skip
    assert found[0] == found[1] == [{"sum": 2.0, "epoch_len": 4}, {"full": {"batches": 4}}]
    assert output.count("using the smallest number for the epoch") == 1


def test_mistakes(tmp_path: Path) -> None:
    found, _ = on_two(tmp_path, """
def told(cls):
    with deepspeed.init(hparams={}) as context:
        try:
            deepspeed.Trainer(cls(context), context).fit(max_length=Batch(1))
        except (InvalidExperimentException, AssertionError, TypeError) as e:
            say(type=type(e).__name__, message=str(e))

class NoEngine(Tiny):
    def __init__(self, context):
        self.events = []
class NoStep(Tiny):
    accumulation = 2
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.engine.backward(self.loss(next(dataloader_iter)))
        self.engine.step()
        if self.engine.micro_steps == 1:
            self.engine.backward(self.loss(next(dataloader_iter)))
            self.engine.step()
        return {}
class Forgotten(Tiny):  # a step that is never taken trains nothing
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.loss(next(dataloader_iter))
        self.engine.backward(loss)
        return {"loss": loss}
class Ended(Tiny):
    def evaluate_batch(self, dataloader_iter, batch_idx):
        next(dataloader_iter)
        return super().evaluate_batch(dataloader_iter, batch_idx)
class Silent(Tiny):
    def __init__(self, context):
        super().__init__(context)
        context.set_mpu(ModelParallelUnit(context.distributed.rank, 2, False, True))
class Uneven(Tiny):
    @property
    def records(self):
        return 16 + 4 * self.context.distributed.rank
class Nothing(Tiny):
    def metrics(self, loss):
        return None
class Module(Tiny):
    def build(self):
        return torch.nn.Linear(1, 1)
class TooFew(Tiny):
    accumulation, records = 8, 8
class Foreign(Tiny):
    def build_training_data_loader(self):
        return torch.utils.data.DataLoader([1, 2])
class NoValidation(Tiny):
    validation_records = 2
for cls in (NoEngine, NoStep, Forgotten, Ended, Silent, Uneven, Nothing, Module, TooFew, Foreign, NoValidation):
    told(cls)
""")  # fmt: skip
    messages = [f"{each['type']}: {each['message']}" for each in found[0]]
    expected = [
        "InvalidExperimentException: NoEngine.__init__() wraps no engine",
        "AssertionError: the first engine took 3 micro steps up to batch 0, which is not a multiple of its "
        "gradient_accumulation_steps=2",
        "AssertionError: no engine took a step in batch 0: train_batch() must call engine.backward(loss)",
        "InvalidExperimentException: evaluate_batch() ran out of data at batch 1 of 2 on rank 0",
        "InvalidExperimentException: no rank reports metrics: some ModelParallelUnit must have should_report_metrics",
        "InvalidExperimentException: length of the training set differs between ranks: micro batches in a pass of all "
        "ranks are 8 on rank 0, 10 on rank 1",
        "InvalidExperimentException: train_batch() returned None for batch 0: expected a dictionary of metrics, or the "
        "loss",
        "TypeError: wrap_model_engine(): expected a DeepSpeedEngine",
        "InvalidExperimentException: the training loader has 2 micro batch(es) for a rank in a pass, fewer than the 8",
        "InvalidExperimentException: build_training_data_loader() returned a DataLoader: expected a det_core.pytorch."
        "DataLoader; for any other loader, call context.disable_dataset_reproducibility_checks()",
        "InvalidExperimentException: the validation loader has 0 batch(es) for a rank",
    ]
    assert len(messages) == len(expected)
    for message, beginning in zip(messages, expected, strict=True):
        assert message.startswith(beginning), message
    assert not any("returned None" in message and "set_mpu" in message for message in messages)


def test_a_repeating_loader_has_epochs_and_validates(tmp_path: Path) -> None:
    """The loader is the one of deepspeed.initialize(training_data=) for a pipeline: without a length or an end."""
    found, _ = on_two(tmp_path, """
import deepspeed as ds
from support.trials import Numbers
class Trial(Pipelined):
    accumulation = 2
    def __init__(self, context):
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()
    def build_training_data_loader(self):
        return ds.runtime.dataloader.RepeatingLoader(torch.utils.data.DataLoader(Numbers(16), 2))
    def build_validation_data_loader(self):
        return ds.runtime.dataloader.RepeatingLoader(torch.utils.data.DataLoader(Numbers(12), 2))
with deepspeed.init(hparams={}) as context:
    trial = Trial(context)
    deepspeed.Trainer(trial, context).fit(max_length=Epoch(2))
ends = {e[0]: e for e in trial.events if len(e) > 1}
say(calls=trial.calls, epoch_len=context._epoch_len, evaluated=len(ends["on_validation_epoch_end"][1]),
    steps=trial.engine.global_steps,
    read=[context._train_micro_batch_size_per_gpu, context._num_micro_batches_per_slot])
""")  # fmt: skip
    expected = {"calls": [*range(8)], "epoch_len": 4, "evaluated": 3, "steps": 8, "read": [2, 2]}
    assert [each[0] for each in found] == [expected, expected]


ADDED = """
import os

class Trial(Pipelined if os.environ["KIND"] == "pipe" else Tiny):
    zero = 0 if os.environ["KIND"] == "pipe" else 1

if __name__ == "__main__":
    try:
        trial = fit(Trial, int(os.environ["LENGTH"]), {"name": "added", "resume": "latest"})
        say(calls=trial.calls)
    except CheckpointError as e:
        say(refused=f"{type(e).__name__}: {e}")
"""


@pytest.mark.parametrize(
    ("kind", "name"), [("zero1", "mp_rank_!_model_states.pt"), ("pipe", "layer_00-!-model_states.pt")]
)
def test_a_pickle_that_was_added_to_a_checkpoint_is_not_executed(tmp_path: Path, kind: str, name: str) -> None:
    """DeepSpeed reads the first file that its pattern finds."""
    on_two(tmp_path, ADDED, KIND=kind, LENGTH="2")
    (folder,) = (path.parent for path in tmp_path.glob("home/runs/*/checkpoints/*/model0"))
    code = "import os, pickle, sys\nclass Code:\n    __reduce__ = lambda self: (os.mkdir, (sys.argv[2],))\n"
    words = [PYTHON, "-c", code + "pickle.dump(Code(), open(sys.argv[1], 'wb'))"]
    subprocess.run([*words, str(folder / "model0" / name), str(tmp_path / "ran")], check=True)
    found, _ = on_two(tmp_path, ADDED, KIND=kind, LENGTH="3")
    assert not (tmp_path / "ran").exists()
    for (told,) in found:
        assert told["refused"].startswith("CheckpointCorrupt") and f"holds model0/{name}, which its" in told["refused"]
    (folder / "model0" / name).unlink()
    found, _ = on_two(tmp_path, ADDED, KIND=kind, LENGTH="3")
    assert [told["calls"] for (told,) in found] == [[2], [2]]


def test_a_checkpoint_of_other_engines_or_another_stage_is_one_error(tmp_path: Path) -> None:
    code = """
import os
class Trial(Tiny):
    zero = int(os.environ["ZERO"])
    def __init__(self, context):
        super().__init__(context)
        for _ in range(int(os.environ["MORE"])):
            context.wrap_model_engine(self.build())
try:
    fit(Trial, int(os.environ["LENGTH"]), {"name": "other", "resume": "latest"})
except CheckpointError as e:
    say(refused=str(e))
"""
    on_two(tmp_path, code, ZERO="0", MORE="0", LENGTH="2")
    engines, _ = on_two(tmp_path, code, ZERO="0", MORE="1", LENGTH="3")
    stage, _ = on_two(tmp_path, code, ZERO="1", MORE="0", LENGTH="3")
    for (told,) in engines:
        assert told["refused"].endswith("has 1 engine(s), but the trial has wrapped 2")
    for (told,) in stage:
        assert (
            "model0 does not fit engine 0: was it written with another model or ZeRO stage? (DeepSpeed: "
            in (told["refused"])
        )


def test_a_trials_methods_called_by_hand(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        HEAD
        + """
from det_core.pytorch.deepspeed import DeepSpeedTrialContext

config = {"hyperparameters": {"lr": {"type": "const", "val": 0.1}, "net": {"width": 8}}, "data": {"url": "here"}}
context = DeepSpeedTrialContext.from_config(config)
trial = Tiny(context)
batches = iter(trial.build_training_data_loader())
losses = [float(trial.train_batch(batches, 0, i)["loss"]) for i in range(3)]
say(hparams=context.get_hparams(), data=context.get_data_config(), seen=trial.seen, steps=trial.engine.global_steps)
try:
    DeepSpeedTrialContext.from_config({"hyperparameters": {"net": {"lr": {"type": "log", "minval": 1}}}})
except ValueError as e:
    say(error=str(e))
"""
    )
    done = warm.run(["script.py"], env={**os.environ, **given(tmp_path)}, cwd=tmp_path, kind=WARM)
    assert done.returncode == 0, done.stdout
    first, second = said(done.stdout)
    assert first["hparams"] == {"lr": 0.1, "net": {"width": 8}} and first["data"] == {"url": "here"}
    assert first["seen"] == [[0, 1], [2, 3], [4, 5]] and first["steps"] == 3
    assert second == {"error": "hyperparameters.net.lr is a search space (log): pass a value to from_config()"}


def test_a_rank_without_a_loader_that_returns_no_metrics(tmp_path: Path) -> None:
    _, output = on_two(tmp_path, """
class Trial(Tiny):
    def __init__(self, context):
        super().__init__(context)
        context.set_mpu(ModelParallelUnit(0, 1, True, context.distributed.rank == 0))
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.engine.backward(self.loss([torch.ones(2, 1), torch.ones(2, 1)]))
        self.engine.step()
        return {"loss": 1.0} if dataloader_iter is not None else None
fit(Trial, 1)
""", status=1)  # fmt: skip
    assert (
        "train_batch() returned None for batch 0: expected a dictionary of metrics, or the loss; if rank 1 "
        "should not report metrics, call context.set_mpu() there with a ModelParallelUnit that has "
        "should_report_metrics=False"
    ) in output
    assert "rank 1" in output and "PeerLost" in output, "rank 0 names the lost one"


def test_a_checkpoint_of_another_run_is_read_if_that_is_allowed(tmp_path: Path) -> None:
    found, _ = on_two(tmp_path, """
store = {"hparams": {}, "checkpoint_storage": str(Path(__file__).parent / "store")}
first = fit(Tiny, 2, store)
uuid = [e[1] for e in first.events if e[0] == "on_checkpoint_upload_end"][-1]
for allowed in (None, True):
    with deepspeed.init(**store, allow_pickle=allowed) as context:
        trial = Tiny(context)
        try:
            deepspeed.Trainer(trial, context).fit(max_length=Batch(3), latest_checkpoint=uuid)
        except CheckpointError as e:
            say(refused=str(e))
        say(calls=trial.calls)
""")  # fmt: skip
    for refused, nothing, went_on in found:
        assert "neither this run nor its experiment wrote them" in refused["refused"]
        assert "DET_CORE_ALLOW_PICKLE=1, or pass deepspeed.init(allow_pickle=True)" in refused["refused"]
        assert nothing["calls"] == [] and went_on["calls"] == [2]


MODEL = """
from support.engine_trials import Tiny, say

class Trial(Tiny):
    zero, accumulation = 1, 2

    def config(self):
        from det_core.pytorch.deepspeed import overwrite_deepspeed_config
        return overwrite_deepspeed_config(super().config(), self.context.get_hparam("overwrite"))

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if len(self.calls) == 5:
            say(calls=self.calls, lr=self.engine.get_lr(), size=self.context.distributed.size)
        return found
"""
EXPERIMENT = """
name: engines
entrypoint: model_def:Trial
hyperparameters: {overwrite: {optimizer: {params: {lr: 0.125}}}}
searcher: {name: single, metric: error, max_length: {batches: 3}}
min_validation_period: {batches: 2}
optimizations: {aggregation_frequency: 4}
"""


def test_a_class_as_a_program(tmp_path: Path) -> None:
    """By the launcher, on two ranks, which are cold here; and alone, by the harness."""
    (tmp_path / "model_def.py").write_text(MODEL)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    words, env = ["model_def:Trial", "--config", "experiment.yaml"], given(tmp_path)
    launcher = FRAMEWORKS["deepspeed"].local(2)
    with launched(launcher, "--trial", *words, folder=tmp_path, **env) as job:
        assert job.wait() == 0, job.err
    alone = warm.run(["-m", "det_core.exec.harness", *words], env={**os.environ, **env}, cwd=tmp_path, kind=WARM)
    assert alone.returncode == 0, alone.stdout
    expected = {"calls": [0, 0, 1, 1, 2], "lr": [0.125]}
    for output, size in ((job.out + job.err, 2), (alone.stdout, 1)):
        assert said(re.sub(r"^\[rank=\d\] ", "", output, flags=re.M)) == [{**expected, "size": size}] * size
        assert "ignoring optimizations.aggregation_frequency" in output and "completed" in output
