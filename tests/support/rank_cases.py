"""Trials on two ranks, one after the other in the same processes: each function fits some, and returns what came of it.

``test_trial_ranks`` starts :func:`main` on both ranks, and looks at what each has printed. A start costs seconds,
nearly all of them for importing torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from det_core import client, core, pytorch
from det_core.pytorch import Batch
from det_core.storage import DirectoryStore
from support.trials import Numbers, Recording, Tiny, WithHooks


def fit(cls: type[Any], length: int, init: dict[str, Any] | None = None, **options: Any) -> Any:
    """Build and fit a trial on this rank."""
    with pytorch.init(**{"hparams": {}, **(init or {})}) as context:
        trial = cls(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(length), **options)
    return trial


def case_29_who_saves() -> Any:
    trial = fit(WithHooks, 2)
    hooks = [e for e in trial.events if isinstance(e, tuple) and "checkpoint" in e[0]]
    return [[e[0] for e in hooks], hooks[-1][-1]]


def case_29_a_file_of_the_chief_alone() -> Any:
    class Drawing(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            torch.manual_seed(context.distributed.rank)

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            self.drawn = torch.rand(1).item()
            return {"loss": loss}

    before = fit(Drawing, 2, {"name": "29"}).drawn
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        store = DirectoryStore(client.run("latest").path / "checkpoints")
        for header in store.list():
            store.delete(header.storage_id, ["rng_rank*.pth"])
    torch.distributed.barrier()
    return [before, fit(Drawing, 4, {"name": "29", "resume": "latest"}).drawn]


class Seven(Tiny):
    """Seven batches of one record in a pass; says at which of its own batches an epoch ends."""

    records, batch_size = 7, 1

    def metrics(self, loss: Any, batch_idx: int) -> Any:
        if self.context.is_epoch_end():
            self.events.append(f"epoch ends with {batch_idx}")
        return {"loss": loss}


def case_30_and_case_31() -> Any:
    straight = fit(Seven, 8, {"name": "30"}, checkpoint_period=Batch(2))
    two = next(c for c in case_checkpoints("30") if c.steps_completed == 2).storage_id
    again = fit(Seven, 8, {"name": "30", "resume": "latest"}, latest_checkpoint=two)
    ends = [e for e in straight.events if "epoch" in e]
    return [[int(i) for [i] in straight.seen], ends, [int(i) for [i] in again.seen]]


def case_checkpoints(name: str) -> Any:
    """Return the checkpoints of the latest run of that name, on every rank."""
    torch.distributed.barrier()
    run = next(run for run in client.runs() if run.name == name)
    with client.checkpoints(run=run.run_id) as checkpoints:
        return list(checkpoints)


def case_35() -> Any:
    found = {}

    class See(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: Any) -> None:
            found[Trial.reducer.name] = metrics["v"]

    class Trial(Tiny):
        reducer = pytorch.Reducer.AVG

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader([0.5, 9.5, 4.5], batch_size=1)

        def evaluate_batch(self, batch: Any) -> Any:  # type: ignore[override]
            return {"v": float(batch)}

        def evaluation_reducer(self) -> Any:
            return self.reducer

        def build_callbacks(self) -> Any:
            return {"see": See()}

    for reducer in pytorch.Reducer:
        Trial.reducer = reducer
        fit(Trial, 1)
    return found


def case_36() -> Any:
    class Trial(Tiny):
        def build(self) -> Any:
            return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))

    trial = fit(Trial, 2, validation_period=Batch(1))
    return [e for e in trial.events if e[0] == "e"]


def case_39() -> Any:
    found = []

    class See(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
            found.append([avg_metrics["rank"], [b["rank"] for b in batch_metrics], avg_metrics["array"].tolist()])

    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            rank = self.context.distributed.rank
            return {"rank": rank, "array": torch.tensor([0.0, 2.0]) * rank}

        def build_callbacks(self) -> Any:
            return {"see": See()}

    fit(Trial, 2)
    return found


def case_40() -> Any:
    class Trial(Tiny):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch
        validation_records = 5

        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            self.sizes = [len(batch[0]) for batch in data_loader]
            return {"classes": [0.25, 0.75]}

    return getattr(fit(Trial, 1), "sizes", None)


class Total(pytorch.MetricReducer):
    """Of one number a rank a list of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.values: list[int] = []

    def update(self, value: int) -> None:
        self.values.append(value)

    def per_slot_reduce(self) -> int:
        return sum(self.values)

    def cross_slot_reduce(self, per_slot_metrics: Any) -> Any:
        assert isinstance(per_slot_metrics, tuple)
        return list(per_slot_metrics)


def case_43_and_case_44() -> Any:
    class Trial(Tiny):
        validation_records = 8

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.everything = context.wrap_reducer(lambda values: list(values), "everything")
            self.total = context.wrap_reducer(Total(), "total", for_training=False)

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            self.everything.update(self.seen[-1][0])
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:  # type: ignore[override]
            self.total.update(self.context.distributed.rank + 1)
            return {"v": 1.0}

        def build_callbacks(self) -> Any:
            return {"recording": Recording(self.events)}

    events = {e[0]: e[1] for e in fit(Trial, 2).events if isinstance(e, tuple) and len(e) > 1}
    training = events["on_training_workload_end"]
    return [training["everything"], events["on_validation_end"]["total"], sorted(training)]


def case_53() -> Any:
    return fit(Tiny, 2, {"aggregation_frequency": 2}).weights


def a_stop_between_updates() -> Any:
    """Stop between two updates, where gradients are each rank's own."""

    class Telling(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            gradient = self.model.weight.grad
            self.events.append(gradient.item() if gradient is not None and gradient.any() else None)
            return {"loss": loss}

    four = {"aggregation_frequency": 4}
    straight = fit(Telling, 6, four)
    fit(Tiny, 2, {"name": "agg", **four})
    after = fit(Tiny, 6, {"name": "agg", "resume": "latest", **four})
    return [straight.weights, after.weights, [e for e in straight.events if not isinstance(e, str)]]


def a_frozen_model() -> Any:
    with pytorch.init(hparams={}) as context:
        torch.manual_seed(context.distributed.rank)
        return context.wrap_model(torch.nn.Linear(1, 1).requires_grad_(False)).weight.item()


def ranks_that_are_given() -> Any:
    """Take the ranks from a script without a launcher's variables, or from its open context."""
    distributed = core.DistributedContext.from_torch_distributed()
    launcher = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    given = fit(Tiny, 2, {"distributed": distributed})
    os.environ.update(launcher)
    with core.init(distributed=core.DistributedContext.from_torch_distributed()) as ctx:
        within = fit(Tiny, 2)
        assert within.context.distributed is ctx.distributed
        ctx.distributed.barrier()
        assert core.current_context() is ctx, "who opened it closes it"
    models = [type(trial.model).__base__.__name__ for trial in (given, within)]
    return [models, given.weights == within.weights, torch.distributed.is_initialized()]


def a_callback_on_one_rank_alone() -> Any:
    trained = []
    for rank in (0, 1):

        class Trial(Tiny):
            here = rank

            def build_callbacks(self) -> Any:
                mine = self.context.distributed.rank == self.here
                return {"recording": Recording(self.events)} if mine else {}

        trial = fit(Trial, 4, validation_period=Batch(2), reporting_period=Batch(1))
        trained.append([len(trial.seen), sum(isinstance(e, tuple) for e in trial.events)])
    return trained


def a_stop_that_one_rank_requests() -> Any:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == 3 and self.context.distributed.rank == 1:
                self.context.set_stop_requested(True)
            return {"loss": loss}

    return len(fit(Trial, 1000).seen)


TOGETHER: list[Callable[[], Any]] = [
    case_29_who_saves, case_29_a_file_of_the_chief_alone, case_30_and_case_31, case_35, case_36, case_39, case_40,
    case_43_and_case_44, case_53, a_stop_between_updates, a_frozen_model, ranks_that_are_given,
    a_callback_on_one_rank_alone, a_stop_that_one_rank_requests,
]  # fmt: skip


def different_reducers() -> None:
    class Trial(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            if context.distributed.rank:
                context.wrap_reducer(sum, "s")

    fit(Trial, 1)


def different_data() -> None:
    """Deal different data to the ranks: each had other permutations, without a warning."""

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(40 + 12 * self.context.distributed.rank), batch_size=2)

    fit(Trial, 2)


def different_options() -> None:
    """Let one rank validate where the other does not: it waited for the other, for ever."""
    with pytorch.init(hparams={}) as context:
        trial, rank = Tiny(context), context.distributed.rank
        pytorch.Trainer(trial, context).fit(max_length=Batch(4), validation_period=Batch(2 + rank))


def a_validation_that_ends_early() -> None:
    class Ending(Numbers):
        def __getitem__(self, i: int) -> Any:
            if i >= 6:
                raise StopIteration
            return super().__getitem__(i)

    class Trial(Tiny):
        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(Ending(8), batch_size=2)

    fit(Trial, 2)


def a_part_called_alone() -> None:
    """Call a part of the model past DDP, by which each rank trained a model of its own."""

    class Trial(Tiny):
        def build(self) -> Any:
            return torch.nn.Sequential(torch.nn.Linear(1, 1))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = ((self.model[0](batch[0]) - batch[1]) ** 2).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

    fit(Trial, 2)


def case_36_no_batch_at_all() -> None:
    class Empty(Tiny):
        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(1), batch_size=2, drop_last=True)

    fit(Empty, 1)


def raising(where: str, culprit: int) -> None:
    """Fit a trial that raises on one rank, out of this method of the user's."""

    def maybe(here: str, trial: Any) -> None:
        if here == where and trial.context.distributed.rank == culprit and len(trial.seen) >= 3:
            raise ValueError("bad sample 4711")

    class Trial(Tiny):
        validation_records = 8

        def build_training_data_loader(self) -> Any:
            trial = self

            class Bad(Numbers):
                def __getitem__(self, i: int) -> Any:
                    maybe("loader", trial)
                    return super().__getitem__(i)

            return pytorch.DataLoader(Bad(40), batch_size=2)

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            maybe("train", self)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:  # type: ignore[override]
            maybe("evaluate", self)
            return {"v": 1.0}

        def build_callbacks(self) -> Any:
            trial = self

            class Raising(pytorch.PyTorchCallback):
                def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
                    maybe("callback", trial)

            return {"raising": Raising()}

    fit(Trial, 30, validation_period=Batch(2))


WHERE = ("train", "evaluate", "callback", "loader")
FAILING: dict[str, Callable[[], Any]] = {
    "different_reducers": different_reducers, "different_data": different_data,
    "different_options": different_options, "a_validation_that_ends_early": a_validation_that_ends_early,
    "a_part_called_alone": a_part_called_alone, "case_36_no_batch_at_all": case_36_no_batch_at_all,
    **{f"{where}-{culprit}": (lambda w=where, c=culprit: raising(w, c)) for where in WHERE for culprit in (0, 1)},
}  # fmt: skip


def say(name: str, value: Any) -> None:
    print("SAID " + json.dumps([name, value]), flush=True)


def main() -> None:
    """Run the functions of :data:`TOGETHER`; or fork for each of :data:`FAILING`, with a port of its own.

    What fails ends its process, as it would in a script.
    """
    torch.set_num_threads(1)
    if sys.argv[1] == "together":
        for case in TOGETHER:
            say(case.__name__, case())
        return
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # loads what all of them need
    for (name, failing), port in zip(FAILING.items(), sys.argv[2:], strict=True):
        sys.stdout.flush()
        if not (child := os.fork()):
            os.environ["MASTER_PORT"] = port
            try:
                failing()
            except Exception as e:
                say(name, f"{type(e).__name__}: {e}")
                raise
            return
        say(f"{name} ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
