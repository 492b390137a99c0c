"""The acceptance cases of the accelerated Trainer that are about ranks, by their numbers; ranks are real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.ranks import running

pytest.importorskip("torch")

HEAD = """
import json, os, sys
import torch
from torch.utils.data import Dataset
from det_core.accelerated import Trainer
from det_core.accelerated.callbacks import StopTrainingError, TerminateOnNaNCallback, TrainerCallback

RANK = int(os.environ["RANK"])
torch.manual_seed(0)


def say(**what):
    print("SAID " + json.dumps(what), flush=True)


class Rows(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.tensor([i / self.count]), torch.tensor([3.0 * i])


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []
    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.losses.append((batch_output["loss"].item(), batch_output["batch_size"]))


def trainer(callbacks=(TerminateOnNaNCallback,), lr=0.01, cls=Trainer, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return cls(model, torch.nn.functional.mse_loss, optimizer, callbacks, **more)


def train(trainer, epochs=1, rows=40, eval_rows=None, size=2, **more):
    trainer.train(
        Rows(rows), epochs, eval_dataset=None if eval_rows is None else Rows(eval_rows), per_device_batch_size=size,
        train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0}, **more,
    )
    return trainer
"""


def on_ranks(
    tmp_path: Path, code: str, *, status: list[int] | None = None
) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Run code on two ranks; what they said, and their whole output."""
    env = {"OMP_NUM_THREADS": "1", "DET_CORE_HOME": str(tmp_path / "home")}
    with running(HEAD + code, 2, tmp_path, env=env) as ranks:
        found = ranks.wait()
        outputs = [ranks.output(rank) for rank in range(2)]
        assert found == (status or [0, 0]), "\n".join(outputs)
        lines = [output.splitlines() for output in outputs]
        return [[json.loads(line[5:]) for line in each if line.startswith("SAID ")] for each in lines], outputs


def test_cases_9_12_and_16_of_ranks_that_have_no_core(tmp_path: Path) -> None:
    """Losses over uneven shares; updates counted over all ranks; a schedule that ends on both. One after the other; the
    process group, whoever made it, is ended with the process."""
    said, _ = on_ranks(tmp_path, """
import atexit, warnings
from det_core.accelerated.schedulers import CosineLrScheduler

atexit.register(lambda: say(grouped=torch.distributed.is_initialized()))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = Losses()
    one = train(trainer([losses], lr=0.0), eval_rows=11)
history = one.run_history
say(case=9, train=history.get_latest_metric("train_loss_epoch"), eval=history.get_latest_metric("eval_loss_epoch"),
    losses=losses.losses, warned=sum("ranks" in str(w.message) for w in caught),
    wrapped="parallel" in type(one.model).__module__)

seen = []
class Counting(Trainer):
    def optimizer_step(self):
        seen.append(1)
        super().optimizer_step()
two = train(trainer(cls=Counting), epochs=7, max_num_train_steps=20)
say(case=12, updates=len(seen), told=two.updates_completed, weight=two.model.weight.item())

cosine = CosineLrScheduler.create_scheduler_fn(lr_min=1e-6, num_cooldown_epochs=1)
three = train(trainer(lr=0.1), epochs=3, create_scheduler_fn=cosine)
say(case=16, rate=three.optimizer.param_groups[0]["lr"], updates=three.updates_completed)
three.evaluate(Rows(11), per_device_batch_size=2, dataloader_kwargs={"num_workers": 0})
say(case=2, names=sorted(three.run_history.get_metric_names()))
class Tokens(Trainer):
    def calculate_train_batch_loss(self, batch):
        return {**super().calculate_train_batch_loss(batch), "num_items_in_batch": 9}
    def backward_step(self, loss):
        shares.append(round(loss.item() / self.batch_loss, 3))
        super().backward_step(loss)
shares = []
train(trainer(cls=Tokens), rows=10, gradient_accumulation_steps=2)
say(shares=shares)
say(gathered=three.gather(torch.full((RANK + 1,), RANK), padding_value=-1).tolist())
""")  # fmt: skip
    (nine, twelve, sixteen, two, tokens, gathered, ended), (nine_1, twelve_1, sixteen_1, *_) = said
    assert nine["losses"] != nine_1["losses"] and len(nine["losses"]) == len(nine_1["losses"]) == 3
    assert nine["warned"] == nine_1["warned"] == 1 and not nine["wrapped"]
    everything = nine["losses"] + nine_1["losses"]
    assert sum(n for _, n in everything) == 11
    weighted = sum(loss * n for loss, n in everything) / 11
    assert nine["eval"] == nine_1["eval"] == pytest.approx(weighted, rel=1e-6)
    assert nine["train"] == nine_1["train"]
    assert twelve["updates"] == twelve_1["updates"] == twelve["told"] == 10
    assert twelve["weight"] == twelve_1["weight"]
    assert sixteen["rate"] == sixteen_1["rate"] == 1e-6 and sixteen["updates"] == 30
    assert two["names"] == ["evaluation_loss"]
    assert tokens["shares"] == [1.0, 1.0, 2.0]  # two ranks of groups of two and one
    assert gathered["gathered"] == [0, 1, 1]
    assert ended == {"grouped": False}


STOPS = """
from det_core import core

class Stops(TrainerCallback):
    def __init__(self, where, error):
        self.where, self.error, self.events = where, error, []
        self.at = None
    def say(self, where, trainer):
        if where == self.where and RANK == 1 and trainer.updates_completed >= 2 and self.at is None:
            self.at = trainer.updates_completed
            raise self.error
    def on_train_step_start(self, trainer, **kwargs): self.say("step start", trainer)
    def on_train_step_end(self, trainer, **kwargs): self.say("step", trainer)
    def on_update(self, trainer, **kwargs): self.say("update", trainer)
    def on_eval_step_start(self, trainer, **kwargs): self.say("eval start", trainer)
    def on_eval_step_end(self, trainer, **kwargs): self.say("eval", trainer)
    def on_train_epoch_end(self, trainer, **kwargs): self.say("epoch", trainer)
    def on_training_run_epoch_end(self, trainer, **kwargs): self.say("run epoch", trainer)
    def on_stop_training_error(self, trainer, **kwargs): self.events.append("stop")
    def on_training_run_end(self, trainer, **kwargs): self.events.append("end")

class Meets(TrainerCallback):
    # waits for the other rank after another callback has stopped this one
    def on_train_epoch_end(self, trainer, **kwargs): trainer.gather(torch.ones(1))
    on_train_step_start = on_train_step_end = on_update = on_training_run_epoch_end = on_train_epoch_end

class Bad(Trainer):
    where = None
    def calculate_train_batch_loss(self, batch):
        found = super().calculate_train_batch_loss(batch)
        if self.where == "nan" and RANK == 1 and self.updates_completed == 2:
            found["loss"] = found["loss"] * float("nan")
        return found
    def calculate_eval_batch_loss(self, batch):
        found = super().calculate_eval_batch_loss(batch)
        if self.where == "eval nan" and RANK == 1:
            found["loss"] = found["loss"] * float("nan")
        return found

def stopped(where, core_context=None, on_nan="stop", accumulation=1):
    stops = Stops(where, StopTrainingError("enough of " + where))
    one = trainer([TerminateOnNaNCallback, stops, Meets], cls=Bad, on_nan=on_nan)
    one.where = where
    train(one, epochs=3, rows=20, eval_rows=12, gradient_accumulation_steps=accumulation)
    say(where=where, updates=one.updates_completed, epoch=one.run_history.current_epoch, at=stops.at,
        events=stops.events, preempted=one.preempted,
        finite=bool(torch.isfinite(one.model.weight).all()))
    return one

WHERE = ("step", "step start", "update", "nan", "eval nan", "eval", "eval start", "epoch", "run epoch")
"""


def test_case_29_a_stop_on_one_rank_stops_all_at_one_update(tmp_path: Path) -> None:
    """In a step, in an evaluation, at an epoch's end: without a core, then with one; each in one process after the
    other, so that none leaves a thing behind that stops the next."""
    said, outputs = on_ranks(tmp_path, STOPS + """
for where in WHERE:
    one = stopped(where)
    one.where = None
    one.evaluate(Rows(12), per_device_batch_size=2, dataloader_kwargs={"num_workers": 0})
stopped("step", accumulation=2)
with core.init(distributed=core.DistributedContext.detect()):
    for where in WHERE:
        stopped(where)
try:
    stopped("nan", on_nan="exit")
except SystemExit as e:
    say(exit=str(e))
""")  # fmt: skip
    exits = [each.pop() for each in said]
    assert exits[0] == exits[1] == {"exit": "Exiting due to NaN loss"}, outputs[0]
    assert len(said[0]) == len(said[1]) == 19
    for mine, theirs in zip(*said, strict=True):
        assert mine["updates"] == theirs["updates"] and mine["epoch"] == theirs["epoch"], (mine, theirs)
        assert mine["events"] == theirs["events"] == ["stop", "end"] and not mine["preempted"], (mine, theirs)
        if mine["where"] in ("step", "step start", "update", "nan"):
            at = 2 if mine["where"] == "nan" else theirs["at"] - (mine["where"] == "update")  # that is after one
            assert at + 1 <= mine["updates"] <= at + 3, (mine, theirs)
        else:
            assert mine["updates"] == 5 and mine["epoch"] == 1, (mine, theirs)
    for where in ("step", "eval", "epoch"):
        assert outputs[0].count(f"enough of {where}\n") >= 2, "rank 0 says why"


@pytest.mark.parametrize("where", ["step", "eval", "core step"])
def test_any_other_exception_on_one_rank_ends_the_others_with_its_text(tmp_path: Path, where: str) -> None:
    _, outputs = on_ranks(tmp_path, STOPS + f"""
where = {where!r}
stops = Stops(where.removeprefix("core "), KeyError("lost the plot"))
if where.startswith("core"):
    with core.init(distributed=core.DistributedContext.detect()):
        train(trainer([stops]), epochs=3, rows=20, eval_rows=12)
else:
    train(trainer([stops]), epochs=3, rows=20, eval_rows=12)
say(end=True)
""", status=[1, 1])  # fmt: skip
    assert "rank 1 has left after" in outputs[0] or "PeerLost" in outputs[0], outputs[0]
    assert "lost the plot" in outputs[0], outputs[0]
    assert "raised by the callback Stops in on_" in outputs[1]


def test_defect_31_a_function_of_one_rank_that_fails_fails_on_all(tmp_path: Path) -> None:
    said, _ = on_ranks(tmp_path, """
from det_core.accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
trainer()

def told(decorate, fails):
    @decorate
    def function(fails):
        if fails:
            raise ValueError(f"on rank {RANK}")
        return RANK
    try:
        return function(fails)
    except (ValueError, RuntimeError) as e:
        return str(e).split(": ")[-1]

for decorate in (local_process_zero_only, world_process_zero_only, local_process_zero_first):
    say(fails=told(decorate, True), returns=told(decorate, False))
""")  # fmt: skip
    assert said[0] == [{"fails": "on rank 0", "returns": 0}] * 3
    assert said[1] == [{"fails": "on rank 0", "returns": None}] * 2 + [{"fails": "on rank 0", "returns": 1}]


def test_gathering_in_the_steps_over_uneven_data(tmp_path: Path) -> None:
    """Short batches are filled from the epoch's beginning; what was there twice is dropped by gather_for_metrics()."""
    said, _ = on_ranks(tmp_path, """
class Gathers(Trainer):
    _pad_uneven_eval_batches = True
    def calculate_train_batch_loss(self, batch):
        found = super().calculate_train_batch_loss(batch)
        gathered.append(len(self.gather(found["model_outputs"].detach())))
        assert self.model.in_features == 1, "attributes of the user's model"
        return found
    def calculate_eval_batch_loss(self, batch):
        kept.extend(self._accelerator.gather_for_metrics(batch[1]).flatten().tolist())
        return super().calculate_eval_batch_loss(batch)

gathered, kept = [], []
one = train(trainer(cls=Gathers), rows=37, eval_rows=37, size=4)
say(gathered=gathered, kept=len(kept), rows=len(set(kept)), updates=one.updates_completed, left=one.model.in_features)
""")  # fmt: skip
    assert said == [[{"gathered": [8] * 5, "kept": 37, "rows": 37, "updates": 5, "left": 1}]] * 2


def test_ranks_that_were_given_different_things_are_told(tmp_path: Path) -> None:
    said, _ = on_ranks(tmp_path, """
for options in (
    {"rows": 40 + 12 * RANK}, {"epochs": 2 + RANK}, {"checkpoint_every": 2 + RANK}, {"eval_rows": None if RANK else 8},
):
    try:
        train(trainer(), **options)
    except ValueError as e:
        say(error=str(e))
say(updates=train(trainer()).updates_completed)
""")  # fmt: skip
    for rank in said:
        data, epochs, every, evaluated, after = rank
        assert "differ in the length of train_dataset: 40 on rank 0, 52 on rank 1. Give all" in data["error"]
        assert "differ in num_epochs: 2 on rank 0, 3 on rank 1" in epochs["error"]
        assert "differ in checkpoint_every: 2 on rank 0, 3 on rank 1" in every["error"]
        assert "differ in the length of eval_dataset: 8 on rank 0, None on rank 1" in evaluated["error"]
        assert after == {"updates": 10}


def test_ranks_whose_data_without_a_length_ends_apart_are_told_whose_ended_first(tmp_path: Path) -> None:
    """Else one would be in the exchange of gradients, and the other in that of the epoch's losses: gloo aborts."""
    said, _ = on_ranks(tmp_path, """
from det_core.errors import PeerLost

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.rows = Rows(count)
    def __iter__(self):
        return (self.rows[i] for i in range(self.rows.count))

def stream(rows, eval_rows=None, **more):
    one = trainer()
    try:
        one.train(
            Stream(rows), 2, eval_dataset=None if eval_rows is None else Stream(eval_rows), per_device_batch_size=2,
            train_dataloader_kwargs={"num_workers": 0}, eval_dataloader_kwargs={"num_workers": 0}, **more,
        )
        say(updates=one.updates_completed, losses=len(one.run_history.get_metric_values("eval_loss_epoch")))
    except ValueError as e:
        say(error=str(e))

stream(40 - 12 * RANK)
stream(28 + 12 * RANK, gradient_accumulation_steps=3)
stream(8, eval_rows=24 - 8 * RANK)
stream(22, eval_rows=10, gradient_accumulation_steps=4)
try:
    stream(8, eval_rows=0)
except (RuntimeError, PeerLost) as e:
    say(error=str(e))
""")  # fmt: skip
    for plain, grouped, evaluated, alike, empty in said:
        assert plain["error"] == (
            "the ranks differ in the length of the train loader: in epoch 1 it ended after 7 batches on rank 1, and "
            "has more on rank 0. Give all of them the same data"
        )
        assert "in epoch 1 it ended after 7 batches on rank 0, and has more on rank 1" in grouped["error"]
        assert "differ in the evaluation data: they have 6, 4 batches, which are not shares" in evaluated["error"]
        assert "the evaluation loader gives no batch" in empty["error"]
        assert alike == {"updates": 4, "losses": 2}, "of six batches for each rank, and of three and two"


def test_ranks_that_would_train_apart_are_told_before_the_first_update(tmp_path: Path) -> None:
    """Gradients that DDP does not see: of a part that is called alone, of a module outside of the model; and what
    an optimizer of the user's has stepped by such gradients. Two parts called through the model train alike."""
    said, _ = on_ranks(tmp_path, """
from det_core.errors import PeerLost

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    def forward(self, part, x):
        return getattr(self, part)(x)

class Alone(Trainer):
    def calculate_train_batch_loss(self, batch):
        x, y = batch
        return {"loss": self.loss_func(self.output(x), y), "model_outputs": y, "batch_size": len(x)}
    def output(self, x):
        return self.model.a(x)

class Outside(Alone):
    def output(self, x):
        return self.model("a", x) + outside(x)

class Stepped(Alone):
    def output(self, x):
        self.model.b(x).sum().backward()
        own.step()
        own.zero_grad()
        return self.model("a", x)

class Through(Alone):
    def output(self, x):
        return self.model("a", x) + self.model("b", x)

for cls in (Alone, Outside, Stepped, Through):
    torch.manual_seed(0)
    model, outside = Two(), torch.nn.Linear(1, 1)
    own = torch.optim.SGD(model.b.parameters(), lr=0.1)
    more = outside.parameters() if cls is Outside else model.b.parameters()
    optimizers = {name: torch.optim.SGD(p, lr=1e-3) for name, p in (("a", model.a.parameters()), ("b", more))}
    one = cls(model, torch.nn.functional.mse_loss, optimizers, callbacks=())
    try:
        train(one, rows=8)
        say(weights=[p.item() for p in model.parameters()])
    except (RuntimeError, PeerLost) as e:
        say(error=str(e))
""")  # fmt: skip
    for alone, outside, stepped, _ in said:
        assert "2 of 4 parameters or gradients differ between ranks (a.weight, a.bias)" in alone["error"]
        assert "one of shape [1, 1] outside of all models" in outside["error"]
        assert "would train apart" in stepped["error"] and "b.weight" in stepped["error"]
    assert said[0][3]["weights"] == said[1][3]["weights"]


def test_a_report_at_an_epochs_last_update_and_other_ranks_after_it(tmp_path: Path) -> None:
    """Decide alike on all ranks whether the report was made, whatever each has counted."""
    code = (
        HEAD
        + """
from det_core import core

class Leaves(TrainerCallback):
    def on_update(self, trainer, **kwargs):
        if SIZE == 1 and trainer.steps_completed == 10:
            core.current_context().preempt._request_stop("signal")

SIZE = int(os.environ["WORLD_SIZE"])
distributed = core.DistributedContext.detect() if SIZE > 1 else None
with core.init(name="window", resume="latest", distributed=distributed):
    one = train(trainer([Leaves()]), epochs=2, rows=20, eval_rows=20, report_every=10)
    say(updates=one.updates_completed, preempted=one.preempted)
"""
    )
    env = {"OMP_NUM_THREADS": "1", "DET_CORE_HOME": str(tmp_path / "home")}
    for size, told in ((1, {"updates": 10, "preempted": True}), (2, {"updates": 15, "preempted": False})):
        (folder := tmp_path / str(size)).mkdir()
        with running(code, size, folder, env=env) as ranks:
            assert ranks.wait() == [0] * size, ranks.output(0)
            assert "SAID " + json.dumps(told) in ranks.output(size - 1)
