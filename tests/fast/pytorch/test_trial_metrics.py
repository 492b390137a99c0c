"""The acceptance cases of trials, by number, in one process: what batches give, averages, reducers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_core import pytorch  # noqa: E402
from det_core.errors import InvalidExperimentException  # noqa: E402
from det_core.pytorch import Batch, LRScheduler  # noqa: E402
from support.trials import Tiny, fit  # noqa: E402

STEP = LRScheduler.StepMode


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


def test_case_37_other_names_in_another_batch() -> None:
    class Trial(Tiny):
        validation_records = 4

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {f"v{batch_idx}": 1.0}

    with pytest.raises(ValueError, match=r"the metrics \{v1\} for batch 1, but \{v0\} before"):
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
        (lambda i: {f"x{i}": 1}, r"the metrics \{x1\} for batch 1, but \{x0\} before"),
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
            return {"per class": [0.25, 0.75], "error": torch.tensor(0.5)}

    found = fit(Trial, 1, init={"searcher_metric": "error"})
    assert found.rows("validation", "per class") == [(1, [0.25, 0.75])] and seen == [[2, 2, 1]]
    assert found.rows("validation", "error") == [(1, 0.5)]


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
        (trial(lambda v: 1), AssertionError, "expected a dict, as it is wrapped without name="),
        (trial(Averaging(), "s", twice=True), AssertionError, "already wrapped"),
        (trial(3, "s"), AssertionError, "expected a MetricReducer or a function, found a int"),
        (trial(fails, "bad"), ValueError, "reducer fails of metric 'bad'.*KeyError: 'oops'"),
    ):
        with pytest.raises(kind, match=message):
            fit(cls, 1)


def test_batches_and_epochs_are_in_reports_unless_the_trial_says_them() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return {"batches": 77.0}

    found = fit(Trial, 4)
    assert found.rows("training", "batches") == [(4, 77.0)] and found.rows("training", "epochs") == [(4, 1)]
    assert found.rows("validation", "batches") == [(4, 4)]
