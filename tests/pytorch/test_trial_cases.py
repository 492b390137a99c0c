"""The acceptance cases of trials, by their numbers: one process, bare."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_core import client, core, pytorch  # noqa: E402
from det_core.errors import InternalException, InvalidExperimentException  # noqa: E402
from det_core.pytorch import Batch, Epoch, LRScheduler  # noqa: E402
from det_core.pytorch._context import _batch_sizes  # noqa: E402
from support.trials import Fitted, Numbers, Tiny, WithHooks, built, fit, resumed  # noqa: E402

STEP = LRScheduler.StepMode


def test_case_01_boundaries() -> None:
    found = fit(WithHooks, 5, validation_period=Batch(2), checkpoint_period=Batch(3), reporting_period=Batch(2),
                checkpoint_policy="none")  # fmt: skip
    kept = {
        "on_training_workload_end": "R", "on_validation_end": "V", "on_checkpoint_upload_end": "C",
    }  # fmt: skip
    trace = [e if isinstance(e, str) else kept.get(e[0]) for e in found.trial.events]
    assert [e for e in trace if e is not None and e[0] != "e"] == [
        "b0", "b1", "R", "V", "b2", "R", "C", "b3", "R", "V", "b4", "R", "V", "C",
    ]  # fmt: skip
    assert found.checkpoints == [3, 5]
    assert (found.rows("training"), found.rows("validation")) == ([2, 3, 4, 5], [2, 4, 5])


def test_case_02_every_boundary_reports() -> None:
    sizes: list[int] = []

    class Trial(WithHooks):
        def build_callbacks(self) -> Any:
            class Counting(pytorch.PyTorchCallback):
                def on_training_workload_end(_, avg_metrics: Any, batch_metrics: Any) -> None:
                    sizes.append(len(batch_metrics))

            return {"counting": Counting()}

    found = fit(Trial, 5, validation_period=Batch(2))
    assert found.rows("training") == [2, 4, 5] and sizes == [2, 2, 1]


def test_case_03_epochs() -> None:
    class Trial(Tiny):
        records = 6

    found = fit(Trial, Epoch(2), validation_period=Epoch(1), reporting_period=Batch(2), checkpoint_policy="all")
    assert found.rows("training") == [2, 3, 4, 6]
    assert found.rows("validation") == found.checkpoints == [3, 6]
    assert found.rows("training", "epochs") == [(2, 0), (3, 1), (4, 1), (6, 2)]


def test_case_04_certain_batches() -> None:
    assert fit(Tiny, 4, validation_period=Batch([1, 3])).rows("validation") == [1, 3, 4]


def test_case_05_no_periods() -> None:
    found = fit(WithHooks, 2)
    order = [e[0] for e in found.trial.events if isinstance(e, tuple)]
    assert order.index("on_training_workload_end") < order.index("on_validation_end")
    assert order.index("on_validation_end") < order.index("on_checkpoint_upload_end")
    assert (found.rows("training"), found.rows("validation"), found.checkpoints) == ([2], [2], [2])


@pytest.mark.parametrize("policy", ["all", "none", "best"])
def test_case_06_validation_before_the_first_batch(policy: str) -> None:
    found = fit(Tiny, 2, step_zero_validation=True, checkpoint_policy=policy)
    assert found.rows("validation") == [0, 2] and found.checkpoints == [2]
    assert found.trial.events == ["e0", "b0", "b1", "e0"]


def test_case_07_test_mode() -> None:
    class Trial(Tiny):
        validation_records = 6

    found = fit(Trial, 10, test_mode=True)
    assert found.trial.events == ["b0", "e0"] and found.rows("validation") == [1]


def test_case_08_a_period_below_one_is_every_batch() -> None:
    assert fit(Tiny, 3, validation_period=Batch(0)).rows("validation") == [1, 2, 3]


def test_case_10_policies() -> None:
    values = [1.0, float("nan"), 0.5, 0.5]

    class Trial(Tiny):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"val_loss": values[len(self.seen) - 1]}

    found = fit(Trial, 4, init={"metric": "val_loss"}, validation_period=Batch(1), checkpoint_policy="best")
    assert found.checkpoints == [1, 3, 4], "not of NaN, and the last because it is the end"
    with pytest.raises(ValueError, match=r"checkpoint_policy='foo'.*'best', 'all', 'none'"):
        fit(Tiny, 2, checkpoint_policy="foo")


def test_case_17_a_stop_that_is_requested() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                self.context.set_stop_requested(True)
            return {"loss": loss}

        def build_callbacks(self) -> Any:
            trial = self

            class Look(pytorch.PyTorchCallback):
                def on_trial_shutdown(self) -> None:
                    trial.stop_requested = trial.context.get_stop_requested()

            return {"look": Look()}

    found = fit(Trial, 9, reporting_period=Batch(3))
    assert found.trial.events == ["b0", "b1"] and found.checkpoints == [2] and found.rows("validation") == []
    assert found.run.state == "stopped"
    assert found.trial.stop_requested, "until the fit is over"


def test_a_request_to_stop_can_be_taken_back() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            self.context.set_stop_requested(True)
            self.context.set_stop_requested(False)
            return {"loss": loss}

    assert fit(Trial, 4).run.state == "completed"


def test_case_19_a_bare_resume_goes_on_with_the_next_data() -> None:
    _, after = resumed(4, 6, type("Trial", (Tiny,), {"records": 20}))
    assert after.trial.events[:2] == ["b4", "b5"] and after.trial.seen == [[8.0, 9.0], [10.0, 11.0]]
    assert after.rows("training") == [4, 6]


def test_case_20_nothing_is_left_to_do() -> None:
    _, after = resumed(4, 4, WithHooks)
    assert not [e for e in after.trial.events if isinstance(e, str)]
    assert (after.rows("validation"), after.checkpoints) == ([4], [4])


def test_case_21_the_checkpoint_of_another_trial() -> None:
    class Looking(Tiny):
        def build_callbacks(self) -> Any:
            trial = self

            class Look(pytorch.PyTorchCallback):
                def on_training_start(self) -> None:
                    trial.restored = copy.deepcopy([trial.weights, trial.optimizer.state_dict()["state"]])

            return {"look": Look()}

    before = fit(Tiny, 3)
    state = before.folder() / "trial_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "trial_id": 77}))
    (state.parent / ".det_core" / "manifest.json").unlink()
    with core.init(resume=before.run.run_id) as ctx:
        storage_id = ctx.latest_checkpoint or state.parent.name
    after = fit(Looking, 2, init={"resume": before.run.run_id}, latest_checkpoint=storage_id)
    assert after.trial.events[:2] == ["b0", "b1"] and after.trial.seen == [[0.0, 1.0], [2.0, 3.0]]
    assert after.trial.restored == [before.trial.weights, before.trial.optimizer.state_dict()["state"]]


class Shuffled(Tiny):
    records, shuffle = 14, True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        context.wrap_lr_scheduler(self.scheduler, STEP.STEP_EVERY_BATCH)

    def build(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))


def test_case_22_straight_and_in_two_parts() -> None:
    torch.manual_seed(11)
    straight = fit(Shuffled, 10)
    torch.manual_seed(11)
    before, after = resumed(5, 10, Shuffled)
    assert before.trial.seen + after.trial.seen == straight.trial.seen
    assert after.trial.weights == straight.trial.weights
    assert after.trial.scheduler.state_dict() == straight.trial.scheduler.state_dict()
    assert after.rows("validation", "val_loss")[-1:] == straight.rows("validation", "val_loss")
    assert after.batches() == straight.batches() and len(straight.batches()) == 10


def test_case_32_loaders_that_cannot_be() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="IterableDataset cannot be sharded"):
        pytorch.DataLoader(Stream())
    for arguments in ({"batch_size": None}, {"persistent_workers": True}, {"prefetch_factor": 4},
                      {"batch_sampler": [[0]], "shuffle": True}, {"sampler": [0], "shuffle": True}):  # fmt: skip
        with pytest.raises(ValueError):
            pytorch.DataLoader(Numbers(), **arguments)  # type: ignore[arg-type]


class Foreign(Tiny):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(Numbers(8), batch_size=2)


def test_case_33_loaders_that_are_not_ours() -> None:
    class Unannounced(Foreign):
        def __init__(self, context: Any) -> None:
            Tiny.__init__(self, context)

    with pytest.raises(InvalidExperimentException, match=r"build_training_data_loader\(\) returned a DataLoader"):
        fit(Unannounced, 2)
    found = fit(Foreign, 6)
    assert len(found.trial.seen) == 6 and found.trial.seen[4] == [0.0, 1.0]

    class Empty(Foreign):
        def build_training_data_loader(self) -> Any:
            return torch.utils.data.DataLoader(Numbers(0), batch_size=2)

    with pytest.raises(RuntimeError, match="gives no batch"):
        fit(Empty, 2)

    class Small(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(2), batch_size=4, drop_last=True)

    for length in (Batch(1), Epoch(1)):
        with pytest.raises(RuntimeError, match="gives no batch"):
            fit(Small, length)


def test_loaders_that_do_not_know_their_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3], [4]])

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(), batch_sampler=Endless())

    before, after = resumed(4, 6, Trial)
    assert before.trial.seen + after.trial.seen == [[0.0, 1.0], [2.0, 3.0], [4.0]] * 2


def test_a_worker_init_fn_finds_the_dataset() -> None:
    class Telling(Numbers):
        label = -1.0

        def __getitem__(self, i: int) -> Any:
            return torch.tensor([self.label]), torch.tensor([0.0])

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Telling(), batch_size=2, num_workers=1, worker_init_fn=label)

    assert fit(Trial, 1).trial.seen == [[99.0, 99.0]]


def label(_worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.label = 99.0


def test_every_callback_is_shut_down() -> None:
    down = []

    class First(pytorch.PyTorchCallback):
        def on_trial_shutdown(self) -> None:
            down.append(type(self).__name__)

    class Second(First):
        def on_trial_shutdown(self) -> None:
            super().on_trial_shutdown()
            raise RuntimeError("no way")

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"first": First(), "second": Second()}

    with pytest.raises(RuntimeError, match="no way"):
        fit(Trial, 1)
    assert down == ["Second", "First"]


def test_case_34_the_average_is_over_batches() -> None:
    class Trial(Tiny):
        validation_records = 5

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"v": batch[0].mean()}

    assert fit(Trial, 1).rows("validation", "v") == [(1, pytest.approx((0.5 + 2.5 + 4) / 3))]


@pytest.mark.parametrize(
    ("reducer", "kind", "message"),
    [
        ({"other": pytorch.Reducer.AVG}, InvalidExperimentException, r"names \{other\}.*returned \{val_loss\}"),
        ({"val_loss": "avg"}, InvalidExperimentException, r"\['val_loss'\] is 'avg'"),
        ("avg", InvalidExperimentException, "returned a str"),
    ],
)
def test_case_37_reducers_that_do_not_fit(reducer: Any, kind: type[Exception], message: str) -> None:
    class Trial(Tiny):
        def evaluation_reducer(self) -> Any:
            return reducer

    with pytest.raises(kind, match=message):
        fit(Trial, 1)


def test_the_whole_set_may_give_tensors() -> None:
    class Whole(Tiny):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"err": torch.tensor(0.5)}

    assert fit(Whole, 1, init={"metric": "err"}).rows("validation", "err") == [(1, 0.5)]


def test_case_37_other_names_in_another_batch() -> None:
    class Trial(Tiny):
        validation_records = 4

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {f"v{batch_idx}": 1.0}

    with pytest.raises(ValueError, match=r"the metrics \{v1\} for batch 1, and \{v0\} before"):
        fit(Trial, 1)


@pytest.mark.parametrize(
    ("returned", "name", "value"),
    [
        (lambda loss, i: torch.tensor(3.0), "loss", 3.0),
        (lambda loss, i: 3, "loss", 3.0),
        (lambda loss, i: np.float32(3), "loss", 3.0),
        (lambda loss, i: {"x": None if i == 0 else 4}, "x", 4.0),
        (lambda loss, i: {"x": "text"}, "x", None),
        (lambda loss, i: {"x": float("nan")}, "x", math.nan),
        (lambda loss, i: {"x": torch.tensor([i, 2.0])}, "x", [0.5, 2.0]),
    ],
)
def test_case_38_what_train_batch_may_return(returned: Any, name: str, value: Any) -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return returned(loss, batch_idx)

    (row,) = fit(Trial, 2).rows("training", name)
    assert repr(row) == repr((2, value))


def test_case_38_nothing_at_all() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return {}

    assert fit(Trial, 2).rows("training") == [2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda i: None, r"train_batch\(\) returned None for batch 0"),
        (lambda i: (1, 2), r"train_batch\(\) returned a tuple for batch 0"),
        (lambda i: {f"x{i}": 1}, r"the metrics \{x1\} for batch 1, and \{x0\} before"),
    ],
)
def test_case_38_what_it_may_not(returned: Any, message: str) -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return returned(batch_idx)

    with pytest.raises((TypeError, ValueError), match=message):
        fit(Trial, 2)


def test_case_40_the_whole_set_at_once() -> None:
    seen: list[Any] = []

    class Trial(Tiny):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch
        validation_records = 5

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            assert not self.model.training and not torch.is_grad_enabled()
            assert isinstance(data_loader, torch.utils.data.DataLoader)
            seen.append([len(batch[0]) for batch in data_loader])
            return {"per class": [0.25, 0.75]}

    assert fit(Trial, 1).rows("validation", "per class") == [(1, [0.25, 0.75])] and seen == [[2, 2, 1]]


def test_case_41_mistakes_before_training() -> None:
    class Both(Tiny):
        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {}

    class Neither(Tiny):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    class NoModel(Tiny):
        def __init__(self, context: Any) -> None:
            self.context = context

    class NoOptimizer(Tiny):
        def __init__(self, context: Any) -> None:
            self.context = context
            context.wrap_model(torch.nn.Linear(1, 1))

    for cls, message in ((Both, "it overrides both"), (Neither, "it overrides neither"), (NoModel, "wraps no model"),
                         (NoOptimizer, "wraps no optimizer")):  # fmt: skip
        with pytest.raises(InvalidExperimentException, match=message):
            fit(cls, 1)
    with built() as trial, pytest.raises(TypeError, match="instance of a PyTorchTrial"):
        pytorch.Trainer(object(), trial.context).fit(max_length=Batch(1))  # type: ignore[arg-type]
    for arguments, kind in (({}, ValueError), ({"max_length": 3}, TypeError), ({"max_length": Batch([1])}, TypeError)):
        with built() as trial, pytest.raises(kind, match="max_length"):
            pytorch.Trainer(trial, trial.context).fit(**arguments)  # type: ignore[arg-type]


def test_a_class_of_the_users_may_be_called_as_ours() -> None:
    cls = type("PyTorchTrial", (Tiny,), {})
    assert fit(cls, 1).rows("validation") == [1]


def test_case_42_with_and_without_the_batchs_index() -> None:
    class Without(Tiny):
        validation_records = 4

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"v": 1.0}

    class With(Tiny):
        validation_records = 4

    assert fit(Without, 1).rows("validation") == [1]
    assert fit(With, 1).trial.events == ["b0", "e0", "e1"]


class Averaging(pytorch.MetricReducer):
    def __init__(self) -> None:
        self.resets = 0
        self.reset()

    def reset(self) -> None:
        self.resets += 1
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    def per_slot_reduce(self) -> Any:
        return self.values

    def cross_slot_reduce(self, per_slot_metrics: Any) -> Any:
        assert isinstance(per_slot_metrics, tuple)
        return sum(map(sum, per_slot_metrics))


def test_case_43_reducers_of_the_users() -> None:
    class Trial(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.both = context.wrap_reducer(Averaging(), "both")
            self.validation = context.wrap_reducer(Averaging(), "only", for_training=False)

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            self.both.update(1.0)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.both.update(10.0)
            self.validation.update(5.0)
            return {"v": 1.0}

    found = fit(Trial, 4, validation_period=Batch(2))
    assert found.rows("training", "both") == [(2, 2.0), (4, 2.0)]
    assert found.rows("training", "only") == [(2, None), (4, None)]
    assert found.rows("validation", "both") == [(2, 10.0), (4, 10.0)]
    assert found.rows("validation", "only") == [(2, 5.0), (4, 5.0)]
    assert found.trial.validation.resets == 1 + 4


def test_case_45_reducers_that_do_not_do() -> None:
    def trial(reducer: Any, name: str | None = None, twice: bool = False) -> type[Tiny]:
        class Trial(Tiny):
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                context.wrap_reducer(reducer, name)
                if twice:
                    context.wrap_reducer(reducer, name)

        return Trial

    def fails(values: list[Any]) -> float:
        raise KeyError("oops")

    assert fit(trial(sum, "s", twice=True), 1).rows("training", "s") == [(1, 0)], "the same function twice is fine"
    for cls, kind, message in (
        (trial(lambda v: {"a": 1}, "s"), AssertionError, "returned a dict"),
        (trial(lambda v: 1), AssertionError, "without a name=, a dict"),
        (trial(Averaging(), "s", twice=True), AssertionError, "wrapped before"),
        (trial(3, "s"), AssertionError, "takes a MetricReducer or a function, not a int"),
        (trial(fails, "bad"), ValueError, "reducer fails of metric 'bad'.*KeyError: 'oops'"),
    ):
        with pytest.raises(kind, match=message):
            fit(cls, 1)


def test_case_46_wrapping_schedulers() -> None:
    with built() as trial:
        context = trial.context
        scheduler = torch.optim.lr_scheduler.StepLR(trial.optimizer, 1)
        assert context.wrap_lr_scheduler(scheduler, STEP.STEP_EVERY_BATCH) is scheduler
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trial.optimizer)
        assert context.wrap_lr_scheduler(plateau, STEP.MANUAL_STEP) is plateau
        with pytest.raises(InvalidExperimentException, match="MANUAL_STEP"):
            context.wrap_lr_scheduler(plateau, STEP.STEP_EVERY_EPOCH)
        other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(trial.model.parameters(), lr=1), 1)
        with pytest.raises(InvalidExperimentException, match="was not wrapped"):
            context.wrap_lr_scheduler(other, STEP.STEP_EVERY_BATCH)
        with pytest.raises(TypeError, match="StepMode"):
            context.wrap_lr_scheduler(scheduler, 2)
    assert [mode.value for mode in (STEP.STEP_EVERY_EPOCH, STEP.STEP_EVERY_BATCH, STEP.MANUAL_STEP,
                                    STEP.STEP_EVERY_OPTIMIZER_STEP)] == [1, 2, 3, 4]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "mode", "frequency", "aggregation", "expected"),
    [
        (47, STEP.STEP_EVERY_BATCH, 1, 1, list(range(12))),
        (47, STEP.STEP_EVERY_BATCH, 3, 1, [2, 5, 8, 11]),
        (47, STEP.STEP_EVERY_EPOCH, 1, 1, [2, 5, 8, 11]),
        (47, STEP.MANUAL_STEP, 1, 1, []),
        (48, STEP.STEP_EVERY_BATCH, 1, 2, [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]),
        (48, STEP.STEP_EVERY_BATCH, 3, 2, [3, 5, 9, 11]),
        (48, STEP.STEP_EVERY_EPOCH, 1, 2, [1, 5, 7, 11]),
        (48, STEP.STEP_EVERY_EPOCH, 2, 2, [5, 11]),
        (48, STEP.STEP_EVERY_OPTIMIZER_STEP, 1, 2, [1, 3, 5, 7, 9, 11]),
        (48, STEP.STEP_EVERY_OPTIMIZER_STEP, 2, 2, [3, 7, 11]),
        (49, STEP.STEP_EVERY_EPOCH, 1, 4, [3, 7, 11, 11]),
    ],
)
def test_case_47_case_48_and_case_49_when_schedulers_step(
    case: int, mode: Any, frequency: int, aggregation: int, expected: list[int]
) -> None:
    steps: list[int] = []

    class Trial(Tiny):
        records = 6

        def __init__(self, context: Any) -> None:
            super().__init__(context)

            class Counting:
                def step(_) -> None:
                    steps.append(context.current_train_batch())

                def state_dict(_) -> dict[str, Any]:
                    return {}

            context.wrap_lr_scheduler(Counting(), mode, frequency)

    fit(Trial, 12, init={"aggregation_frequency": aggregation})
    assert steps == expected


class Summing(Tiny):
    """The gradient of batch i is i + 1."""

    average: bool | None = None
    records = 20

    def __init__(self, context: Any) -> None:
        self.context, self.seen, self.events = context, [], []
        self.clipped: list[list[float]] = []
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0), average_aggregated_gradients=self.average
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.backward(self.model.weight.sum() * (batch_idx + 1))
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": 0.0}

    def clip(self, parameters: Any) -> None:
        assert isinstance(parameters, list)
        self.clipped.append([p.grad.item() for p in parameters])


def test_case_50_aggregation() -> None:
    found = fit(Summing, 2, init={"aggregation_frequency": 2})
    assert found.trial.weights == [-1.5] and found.trial.clipped == [[1.5]]
    added = fit(type("Added", (Summing,), {"average": False}), 2, init={"aggregation_frequency": 2})
    assert added.trial.weights == [-3.0]


def test_case_51_the_phase_of_updates() -> None:
    class NoZero(Summing):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.backward(self.model.weight.sum())
            self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
            return {}

    with pytest.raises(InvalidExperimentException, match="auto_zero_grads=False"):
        fit(NoZero, 2, init={"aggregation_frequency": 2})
    fit(Summing, 3, init={"aggregation_frequency": 2, "name": "r"})
    after = fit(Summing, 4, init={"aggregation_frequency": 2, "name": "r", "resume": "latest"})
    assert after.trial.clipped == [[3.5]], "batch 3 updates: (3 + 4) / 2"


def test_a_stop_between_updates_changes_nothing() -> None:
    init = {"aggregation_frequency": 4}
    straight = fit(Tiny, 10, init=init)
    fit(Tiny, 6, init={**init, "name": "r"})
    after = fit(Tiny, 10, init={**init, "name": "r", "resume": "latest"})
    assert after.trial.weights == straight.trial.weights
    assert (after.folder(6) / "gradients_rank0.pth").exists()
    with built(Tiny, **init) as trial:
        trainer = pytorch.Trainer(trial, trial.context)
        for length in (3, 4):  # the second from the beginning, without the gradients of the first
            trainer.fit(max_length=Batch(length))
    assert trial.weights == fit(Tiny, 4, init=init).trial.weights


def test_case_52_two_optimizers() -> None:
    class Two(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.other = context.wrap_model(torch.nn.Linear(1, 1))
            context.wrap_optimizer(torch.optim.SGD(self.other.parameters(), lr=0.1))
            self.before = [p.tolist() for p in self.other.parameters()]

    found = fit(Two, 3)
    assert [p.tolist() for p in found.trial.other.parameters()] == found.trial.before


def test_case_54_mixed_precision() -> None:
    class Amp(Tiny):
        dtype: Any = None

        def __init__(self, context: Any) -> None:
            context.experimental.use_amp(self.dtype)
            super().__init__(context)
            assert type(self.model) is torch.nn.Linear

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            assert loss.dtype is torch.float32
            return {"loss": loss}

    plain, amp = fit(Tiny, 3), fit(Amp, 3)
    assert amp.trial.weights == plain.trial.weights, "nothing on a CPU"
    half = fit(type("Half", (Amp,), {"dtype": torch.bfloat16}), 3)
    assert half.trial.weights != plain.trial.weights
    assert half.trial.weights == pytest.approx(plain.trial.weights, rel=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytorch.init(hparams={}) as context:
        context.experimental.use_amp()
        with pytest.raises(InvalidExperimentException, match=r"there is a scaler already, by experimental.use_amp\(\)"):
            context.wrap_scaler(scaler)
    with built() as trial, pytest.raises(InvalidExperimentException, match="before wrap_model"):
        trial.context.wrap_scaler(scaler)
    with pytorch.init(hparams={}) as context:
        assert context.wrap_scaler(scaler) is scaler
        with pytest.raises(InvalidExperimentException, match=r"there is a scaler already, by wrap_scaler\(\)"):
            context.wrap_scaler(scaler)
        with pytest.raises(InvalidExperimentException, match="apex is not supported"):
            context.configure_apex_amp([], [])
        assert context.configure_apex_amp(1, 2, enabled=False) == (1, 2)


def test_case_55_to_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with built() as trial:
        moved = trial.context.to_device(
            {"a": [np.ones(2), np.arange(2)], "b": ("text", np.array(["x"])), "c": torch.ones(1), "d": None}
        )
        assert [type(x) for x in moved["a"]] == [torch.Tensor] * 2 and moved["a"][0].dtype is torch.float64
        assert moved["b"][0] == "text" and isinstance(moved["b"], tuple)
        trial.context.to_device("more text")
    assert caplog.text.count("values of type str in a batch are not moved") == 1

    class AsCollated(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.experimental.disable_auto_to_device()

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(), batch_size=2, collate_fn=lambda items: {"items": items})

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            assert list(batch) == ["items"]
            self.context.backward(self.model(batch["items"][0][0]).sum())
            self.context.step_optimizer(self.optimizer)
            return {}

    fit(AsCollated, 1)


def test_case_56_the_order_of_hooks() -> None:
    class Trial(WithHooks):
        records = 4

    found = fit(Trial, Epoch(1))
    order = [e if isinstance(e, str) else e[0] for e in found.trial.events]
    assert order == [
        "on_trial_startup", "on_training_start", "on_training_epoch_start", "b0", "b1", "on_training_epoch_end",
        "on_training_workload_end", "on_validation_start", "on_validation_epoch_start", "e0",
        "on_validation_epoch_end", "on_validation_end", "on_checkpoint_save_start", "on_checkpoint_write_end",
        "on_checkpoint_upload_end", "on_trial_shutdown",
    ]  # fmt: skip

    class Raising(WithHooks):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    with built(Raising) as trial, pytest.raises(KeyError, match="mine"):
        pytorch.Trainer(trial, trial.context).fit(max_length=Batch(3))
    assert trial.events[-1] == ("on_trial_shutdown",)


def test_case_57_invalid_hyperparameters() -> None:
    from det_core import InvalidHP

    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise InvalidHP("too wide")
            return {"loss": loss}

    with pytest.raises(SystemExit) as e:
        fit(Trial, 5, init={"name": "r"})
    assert e.value.code == 0
    run = client.run("latest")
    assert run.state == "invalid_hp"
    with client.checkpoints(run=run.run_id) as checkpoints:
        assert [c.steps_completed for c in checkpoints] == [2]


def test_what_is_asked_too_early() -> None:
    with built() as trial:
        context = trial.context
        for ask in (context.current_train_batch, context.is_epoch_start, context.is_epoch_end,
                    context.current_train_epoch, lambda: context.step_optimizer(trial.optimizer)):  # fmt: skip
            with pytest.raises(InternalException, match="before training"):
                ask()


def test_batch_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with pytorch.init(hparams={"global_batch_size": 8}) as context:
        assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (8, 8)
        assert context.get_hparam("global_batch_size") == 8
    assert "use context.get_per_slot_batch_size()" in caplog.text
    assert _batch_sizes({"global_batch_size": 9}, 2) == (8, 4)
    assert "global_batch_size is 8, as 9 is not divisible by 2 ranks" in caplog.text
    with pytest.raises(InvalidExperimentException, match="less than one record for each of 2 ranks"):
        _batch_sizes({"global_batch_size": 1}, 2)
    with pytorch.init(hparams={"lr": 1}) as context:
        with pytest.raises(ValueError, match="have no global_batch_size"):
            context.get_global_batch_size()
        with pytest.raises(ValueError, match="no hyperparameter 'x'; there are lr"):
            context.get_hparam("x")
    with pytest.raises(InvalidExperimentException, match="must be an integer, not 'many'"):
        with pytorch.init(hparams={"global_batch_size": "many"}):
            pass


def test_what_a_bare_run_has_no_number_for() -> None:
    with built() as trial:
        context = trial.context
        assert (context.get_experiment_id(), context.get_trial_id(), context.get_initial_batch()) == (0, 0, 0)
        assert context.get_tensorboard_path().is_relative_to(client.run(context._core.run_id).path)
        with pytest.raises(InternalException, match="a bare run has no seed"):
            context.get_trial_seed()


def test_batches_and_epochs_are_in_reports_unless_the_trial_says_them() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return {"batches": 77.0}

    found = fit(Trial, 4)
    assert found.rows("training", "batches") == [(4, 77.0)] and found.rows("training", "epochs") == [(4, 1)]
    assert found.rows("validation", "batches") == [(4, 4)]


def test_a_resume_with_a_loader_that_is_not_ours_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    _, after = resumed(2, 4, Foreign)
    assert after.trial.seen == [[0.0, 1.0], [2.0, 3.0]], "from its beginning"
    assert caplog.text.count("starts from its beginning: this resume is not exact") == 1


def test_an_older_callbacks_epoch_start_has_no_parameter(caplog: pytest.LogCaptureFixture) -> None:
    class Older(pytorch.PyTorchCallback):
        count = 0

        def on_training_epoch_start(self) -> None:  # type: ignore[override]
            Older.count += 1

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"older": Older()}

    fit(Trial, 5)
    assert Older.count == 2 and caplog.text.count("has no parameter epoch_idx") == 1


def test_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    fit(Tiny, 3)
    assert "1/3" in screen.getvalue() and "\r\x1b[Kvalidation at batch 3: val_loss " in screen.getvalue()


def test_best_without_a_metric_saves_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert fit(Tiny, 2, validation_period=Batch(1)).checkpoints == [1, 2]
    assert [r.levelname for r in caplog.records if "every validation is saved" in r.message] == ["INFO"]
    fit(Tiny, 1, checkpoint_policy="best")
    assert [r.levelname for r in caplog.records if "every validation is saved" in r.message] == ["INFO", "WARNING"]


def test_fit_again_in_the_same_context_starts_anew_with_the_weights() -> None:
    with built(WithHooks) as trial:
        trainer = pytorch.Trainer(trial, trial.context)
        trainer.fit(max_length=Batch(2))
        after_first = trial.weights
        trainer.fit(max_length=Batch(3))
        run_id = trial.context._core.run_id
    found = Fitted(trial, run_id)
    assert [e for e in trial.events if isinstance(e, str) and e[0] == "b"] == ["b0", "b1", "b0", "b1", "b2"]
    assert found.rows("training") == found.checkpoints == [2, 5] and trial.weights != after_first


def test_validating_does_not_shift_the_random_numbers_of_training() -> None:
    class Trial(Shuffled):
        validation_records = 5

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(self.validation_records), batch_size=2, shuffle=True)

    weights = []
    for period in (Batch(1), None):
        torch.manual_seed(4)
        weights.append(fit(Trial, 6, validation_period=period, checkpoint_policy="none").trial.weights)
    assert weights[0] == weights[1]
