"""The acceptance cases of trials, by number, in one process: optimizers, schedulers, aggregation, precision."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from det_core import pytorch  # noqa: E402
from det_core.errors import InvalidExperimentException  # noqa: E402
from det_core.pytorch import Batch, LRScheduler  # noqa: E402
from support.trials import Tiny, built, fit  # noqa: E402

STEP = LRScheduler.StepMode


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


def test_a_fit_again_has_none_of_the_gradients_of_the_one_before() -> None:
    init = {"aggregation_frequency": 4}
    assert (fit(Tiny, 6, init=init).folder() / "gradients_rank0.pth").exists()
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
        with pytest.raises(InvalidExperimentException, match=r"a scaler exists already, from experimental.use_amp\(\)"):
            context.wrap_scaler(scaler)
    with built() as trial, pytest.raises(InvalidExperimentException, match="before wrap_model"):
        trial.context.wrap_scaler(scaler)
    with pytorch.init(hparams={}) as context:
        assert context.wrap_scaler(scaler) is scaler
        with pytest.raises(InvalidExperimentException, match=r"a scaler exists already, from wrap_scaler\(\)"):
            context.wrap_scaler(scaler)
        with pytest.raises(InvalidExperimentException, match="apex is not supported"):
            context.configure_apex_amp([], [])
        assert context.configure_apex_amp(1, 2, enabled=False) == (1, 2)
