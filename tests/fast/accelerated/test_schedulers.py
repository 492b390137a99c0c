"""Schedules against values worked out by hand."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from det_core.accelerated._placeholders import replace_trainer_placeholder_values  # noqa: E402
from det_core.accelerated.schedulers import CosineLrScheduler, SchedulerBase, StatefulSchedulerBase, WSDLrScheduler  # noqa: E402
from det_core.accelerated.schedulers.wsd_scheduler import estimate_checkpoint_steps  # noqa: E402


def sgd(*rates: float, **options: Any) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)]
    return torch.optim.SGD(groups, lr=0.5, **options)


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def rate(scheduler: Any, n: int) -> float:
    """Of the first group."""
    value: float = scheduler.get_updated_values(n)[0]
    return value


class Fixed(StatefulSchedulerBase):
    """Scheduler with given values."""

    def __init__(self, optimizer: Any, values: Any, field: str = "lr") -> None:
        super().__init__(optimizer, field)
        self.values = values

    def get_updated_values(self, num_updates: int) -> float | Sequence[float] | None:
        found: float | Sequence[float] | None = self.values
        return found


# The base classes


def test_one_value_is_for_all_groups_and_a_sequence_has_one_for_each() -> None:
    np = pytest.importorskip("numpy")
    for given_, wanted in [
        (0.5, [0.5, 0.5]),
        ([0.1, 0.2], [0.1, 0.2]),
        ((0.1, 0.2), [0.1, 0.2]),
        (np.array([0.1, 0.2]), [0.1, 0.2]),
        (np.float64(0.5), [0.5, 0.5]),
        (torch.tensor(0.5), [0.5, 0.5]),
        (None, [1.0, 2.0]),
    ]:
        optimizer = sgd(1.0, 2.0)
        Fixed(optimizer, given_).step()
        assert rates(optimizer) == wanted
        assert all(type(value) is float for value in rates(optimizer)), "which weights_only reads back"
    with pytest.raises(ValueError, match=r"Fixed.get_updated_values\(\) returned 3 values for 2 parameter groups"):
        Fixed(sgd(1.0, 2.0), [1, 2, 3]).step()


def test_a_missing_field() -> None:
    optimizer = sgd(1.0, 2.0)
    del optimizer.param_groups[1]["weight_decay"]
    with pytest.raises(KeyError, match=r"weight_decay missing from param_groups\[1\]"):
        Fixed(optimizer, 1.0, "weight_decay")


def test_base_values_are_those_of_the_first_scheduler() -> None:
    optimizer = sgd(1.0, 2.0)
    Fixed(optimizer, 0.25).step()
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    second = Fixed(optimizer, 0.25)
    assert second.base_lr_values == [1.0, 2.0] and rates(optimizer) == [1.0, 2.0]


def test_the_first_step_applies_the_value_of_no_updates() -> None:
    seen = []

    class Recording(StatefulSchedulerBase):
        def get_updated_values(self, num_updates: int) -> None:
            seen.append(num_updates)

    scheduler = Recording(sgd())
    assert scheduler._num_updates == -1
    for _ in range(3):
        scheduler.step()
    assert seen == [0, 1, 2]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    optimizer = sgd()
    held = optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    scheduler = Fixed(optimizer, 0.5)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held and held.item() == 0.5
    assert scheduler.base_lr_values == [1.0]


def test_case_23_a_scheduler_of_weight_decay_without_state_methods_in_a_checkpoint() -> None:
    class Halving(StatefulSchedulerBase):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer, param_group_field="weight_decay")

        def get_updated_values(self, num_updates: int) -> float:
            return float(self.base_lr_values[0]) * 0.5 ** (num_updates + 1)

    optimizer = sgd(weight_decay=0.8)
    scheduler = Halving(optimizer)
    for _ in range(2):
        scheduler.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.2 and rates(optimizer) == [1.0]
    buffer = io.BytesIO()
    torch.save(scheduler.state_dict(), buffer)
    buffer.seek(0)
    again = sgd(weight_decay=0.8)
    loaded = Halving(again)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    loaded.step()
    assert again.param_groups[0]["weight_decay"] == 0.1
    assert loaded.optimizer is again


def test_a_base_without_a_count() -> None:
    class Linear(SchedulerBase):
        def get_updated_values(self, num_updates: int) -> float:
            return 1 / (1 + num_updates)

    optimizer = sgd()
    Linear(optimizer).step_update(3)
    assert rates(optimizer) == [0.25]


# Cosine


def test_case_17_cosine_with_warmup_and_cooldown() -> None:
    scheduler = CosineLrScheduler(sgd(), 10, 10, num_warmup_epochs=2, num_cooldown_epochs=2)
    assert rate(scheduler, 0) == 1e-6 and rate(scheduler, 20) == 1
    assert rate(scheduler, 10) == pytest.approx(0.5, abs=1e-6)
    assert rate(scheduler, 50) == pytest.approx(0.5, abs=1e-6)
    assert rate(scheduler, 35) == pytest.approx(0.5 + math.sqrt(0.5) / 2, abs=1e-6), "a quarter of the way"
    assert rate(scheduler, 79) < 0.01
    assert {rate(scheduler, n) for n in (80, 90, 99, 100, 101, 1000)} == {1e-6}
    values = [rate(scheduler, n) for n in range(20, 101)]
    assert values == sorted(values, reverse=True)
    steps = [before - after for before, after in pairwise(values)]
    assert max(steps) < 0.03, "no jump"


def test_case_18_warmup_from_a_ratio() -> None:
    scheduler = CosineLrScheduler(sgd(), 4, 10, num_warmup_epochs=1, warmup_starting_lr_ratio=0.5)
    assert [rate(scheduler, n) for n in (0, 1, 2, 10)] == pytest.approx([0.5, 0.55, 0.6, 1.0])
    assert max(rate(scheduler, n) for n in range(60)) == 1.0


def test_case_19_two_groups_end_at_half_of_each_base() -> None:
    optimizer = sgd(1.0, 0.2)
    scheduler = CosineLrScheduler(optimizer, 2, 5, min_lr_ratio=0.5)
    for _ in range(11):
        scheduler.step()
    assert rates(optimizer) == [0.5, 0.1]
    assert scheduler.get_updated_values(5) == pytest.approx([0.75, 0.15])


def test_case_16_the_default_follows_the_updates_of_one_process() -> None:
    """The part of the case that is about the schedule: ``T`` local updates bring the rate to the floor."""
    config = SimpleNamespace(num_epochs=2, num_update_steps_per_epoch=20, num_local_update_steps_per_epoch=10)
    create = CosineLrScheduler.create_scheduler_fn()
    scheduler = replace_trainer_placeholder_values(SimpleNamespace(run_config=config), create)(sgd())
    assert scheduler.total_iterations == 20
    assert rate(scheduler, 19) > 1e-6 and rate(scheduler, 20) == 1e-6


def test_the_constructor_writes_the_start_of_a_warmup() -> None:
    optimizer = sgd(1.0, 0.5)
    CosineLrScheduler(optimizer, 2, 5, num_warmup_epochs=1, warmup_starting_lr_ratio=0.5)
    assert rates(optimizer) == [0.5, 0.25]
    optimizer = sgd(1.0)
    CosineLrScheduler(optimizer, 2, 5)
    assert rates(optimizer) == [1.0]


def test_k_decay_bends_the_curve() -> None:
    plain, bent = CosineLrScheduler(sgd(), 1, 100), CosineLrScheduler(sgd(), 1, 100, k_decay=2.0)
    assert rate(bent, 50) == pytest.approx(1e-6 + (1 - 1e-6) * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(bent, 50) > rate(plain, 50)
    assert rate(bent, 100) == rate(plain, 100) == 1e-6


def test_cosine_saved_and_loaded() -> None:
    optimizer = sgd()
    scheduler = CosineLrScheduler(optimizer, 2, 10, num_warmup_epochs=1)
    for _ in range(7):
        scheduler.step()
    state = scheduler.state_dict()
    assert set(state) == {
        "total_iterations", "lr_min_ratio", "lr_min", "warmup_iterations", "warmup_lr_init", "warmup_lr_ratio",
        "k_decay", "num_cooldown_iterations", "num_updates",
    }  # fmt: skip
    other = sgd()
    again = CosineLrScheduler(other, 1, 1)
    again.load_state_dict(state)
    for _ in range(5):
        scheduler.step()
        again.step()
        assert rates(other) == rates(optimizer)
    with pytest.raises(KeyError, match="total_iterations"):
        again.load_state_dict(WSDLrScheduler(sgd(), total_steps=10).state_dict())


@pytest.mark.parametrize(("epochs", "steps", "lr_min"), [(0, 1, 0), (1, 0, 0), (1, 1, -1e-9)])
def test_cosine_refuses_what_is_no_schedule(epochs: int, steps: int, lr_min: float) -> None:
    with pytest.raises(AssertionError):
        CosineLrScheduler(sgd(), epochs, steps, lr_min=lr_min)


@given(
    total=st.integers(1, 60),
    steps=st.integers(1, 20),
    warmup=st.integers(0, 30),
    cooldown=st.integers(0, 30),
    k=st.floats(0.2, 5),
    floor=st.floats(0, 1),
    start=st.floats(0, 1),
)
def test_cosine_rises_to_the_base_then_falls_to_the_floor(
    total: int, steps: int, warmup: int, cooldown: int, k: float, floor: float, start: float
) -> None:
    scheduler = CosineLrScheduler(
        sgd(), total, steps, k, lr_min=floor, num_warmup_epochs=warmup, warmup_starting_lr=start,
        num_cooldown_epochs=cooldown,
    )  # fmt: skip
    end = max(total * steps, warmup * steps) + 3
    values = [rate(scheduler, n) for n in range(end)]
    top = warmup * steps
    near = 1e-12
    assert all(a <= b + near for a, b in pairwise(values[:top]))
    assert all(a >= b - near for a, b in pairwise(values[top:]))
    assert min(floor, start) - near <= min(values) and max(values) <= 1 + near
    if top < total * steps - cooldown * steps:
        assert values[top] == pytest.approx(1.0)
    assert values[-1] == floor


# Warmup, stable, decay


def test_case_20_wsd() -> None:
    scheduler = WSDLrScheduler(sgd(), total_steps=20, decay_phase_ratio=0.25, lr_min=0.1)
    assert {rate(scheduler, n) for n in range(16)} == {1.0}
    wanted = [0.59751, 0.43079, 0.30286, 0.19502, 0.1, 0.1, 0.1]
    assert [rate(scheduler, n) for n in range(16, 23)] == pytest.approx(wanted, abs=5e-6)
    inverse = WSDLrScheduler(sgd(), total_steps=20, decay_phase_ratio=0.25, lr_min=0.1, use_inverse_sqrt_decay=False)
    wanted = [1.0, 0.35714, 0.21739, 0.15625, 0.12195, 0.1, 0.1]
    assert [rate(inverse, n) for n in range(15, 22)] == pytest.approx(wanted, abs=5e-6)


def test_case_21_the_checkpoints() -> None:
    assert estimate_checkpoint_steps(100, 1) == [100]
    assert estimate_checkpoint_steps(100, 2) == [50, 100]
    assert estimate_checkpoint_steps(100, 3) == [25, 50, 100]
    assert estimate_checkpoint_steps(101, 3)[-1] == 101
    assert estimate_checkpoint_steps(3, 4) == [1, 3]


@given(total=st.integers(1, 10_000), number=st.integers(1, 20), ratio=st.floats(0, 1 / 3))
def test_periods_fill_the_run_and_each_starts_at_the_base(total: int, number: int, ratio: float) -> None:
    scheduler = WSDLrScheduler(sgd(), total_steps=total, num_checkpoints=number, decay_phase_ratio=ratio, lr_min=0.1)
    info = scheduler.get_decay_info()
    assert [i["period_end"] for i in info] == scheduler.get_checkpoint_steps()
    assert scheduler.checkpoint_steps[-1] == total and len(info) <= number
    assert [i["period_start"] for i in info] == [0, *scheduler.checkpoint_steps[:-1]]
    for i in info:
        length = i["period_end"] - i["period_start"]
        assert length > 0 and i["decay_steps"] == int(length * ratio)
        assert i["pre_decay_step"] == i["period_end"] - i["decay_steps"]
        assert rate(scheduler, i["period_start"]) == 1.0
        last = rate(scheduler, i["period_end"] - 1)
        assert 0.1 < last < 1.0 if i["decay_steps"] > 1 else last == 1.0
    end = rate(scheduler, total)
    assert end == (pytest.approx(0.1) if info[-1]["decay_steps"] else 1.0)
    assert rate(scheduler, total + 100) == end


def test_case_22_wsd_saved_at_step_18() -> None:
    optimizer = sgd()
    scheduler = WSDLrScheduler(optimizer, total_steps=40, decay_phase_ratio=0.75, lr_min=0.1)
    while scheduler.get_current_step() < 18:
        scheduler.step()
    state = scheduler.state_dict()

    other = sgd()
    again = WSDLrScheduler(other, total_steps=99)
    again.load_state_dict(state)
    scheduler.step()
    again.step()
    assert again.get_current_step() == 19 and rates(other) == rates(optimizer)
    assert rates(other)[0] < 1.0, "in the middle of the decay"

    goes_on = sgd()
    continued = WSDLrScheduler(goes_on, total_steps=80, num_warmup_steps=5, is_continuation_from_checkpoint=True)
    continued.previous_checkpoint_step = 7
    continued.step()
    continued.load_state_dict(state)
    assert (continued.total_steps, continued.decay_phase_ratio, continued.get_current_step()) == (80, 0.75, -1)
    assert continued.previous_checkpoint_step is None and continued.is_continuation_from_checkpoint
    assert continued.get_decay_info() == [
        {"period_start": 0, "period_end": 80, "decay_steps": 60, "pre_decay_step": 20}
    ]
    continued.step()
    assert continued.get_current_step() == 0 and rates(goes_on) == [1.0], "without a warmup"


def test_a_continuation_that_is_itself_resumed_goes_on() -> None:
    def continued() -> WSDLrScheduler:
        return WSDLrScheduler(sgd(), total_steps=40, is_continuation_from_checkpoint=True)

    scheduler = continued()
    for _ in range(9):
        scheduler.step()
    again = continued()
    again._restore(scheduler.state_dict())
    again.step()
    assert again.get_current_step() == 9


def test_wsd_loads_what_there_is() -> None:
    scheduler = WSDLrScheduler(sgd(), total_steps=40)
    for _ in range(4):
        scheduler.step()
    before = scheduler.state_dict()
    scheduler.load_state_dict({"lr_min": 0.5, "unknown": 1})
    assert scheduler.state_dict() == {**before, "lr_min": 0.5}
    assert not hasattr(scheduler, "unknown")


def test_the_state_is_that_of_the_moment_and_readable_with_weights_only() -> None:
    scheduler = WSDLrScheduler(sgd(), total_steps=100, num_checkpoints=3)
    buffer = io.BytesIO()
    torch.save(scheduler.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == scheduler.state_dict()
    assert "optimizer" not in scheduler.state_dict() and scheduler.state_dict()["num_updates"] == -1


def test_phases() -> None:
    scheduler = WSDLrScheduler(sgd(), total_steps=100, num_checkpoints=2, decay_phase_ratio=0.2)
    first, second = scheduler.get_decay_info()
    assert first == {"period_start": 0, "period_end": 50, "decay_steps": 10, "pre_decay_step": 40}
    assert second == {"period_start": 50, "period_end": 100, "decay_steps": 10, "pre_decay_step": 90}
    assert [scheduler.get_phase_info(n) for n in (0, 50, 51, 100, 101)] == [first, first, second, second, second]
    assert scheduler.get_current_phase_info() == first
    assert scheduler._get_checkpoint_info(49) == (50, 49) and scheduler._get_checkpoint_info(50) == (50, 0)
    scheduler._get_checkpoint_info.cache_clear()  # type: ignore[attr-defined]
    first["period_end"] = 0
    assert scheduler.get_decay_info()[0]["period_end"] == 50, "a copy"


def test_wsd_warmup() -> None:
    optimizer = sgd(1.0, 0.5)
    scheduler = WSDLrScheduler(optimizer, total_steps=100, num_warmup_steps=10, warmup_starting_lr=0.1)
    assert scheduler.get_updated_values(0) == [0.1, 0.1]
    assert scheduler.get_updated_values(5) == pytest.approx([0.55, 0.3])
    assert scheduler.get_updated_values(10) == [1.0, 0.5]
    assert WSDLrScheduler(sgd(), total_steps=250, num_warmup_steps=None).num_warmup_steps == 2


def test_wsd_without_a_floor_ends_at_zero() -> None:
    for form in (True, False):
        scheduler = WSDLrScheduler(
            sgd(), total_steps=10, decay_phase_ratio=0.5, lr_min=0.0, use_inverse_sqrt_decay=form
        )
        assert rate(scheduler, 5) == 1.0 and rate(scheduler, 10) == 0.0
        assert all(0 <= rate(scheduler, n) < 1 for n in range(6, 12))


def test_wsd_refuses_what_is_no_schedule() -> None:
    for wrong in ({"total_steps": 0}, {"decay_phase_ratio": 1.1}, {"lr_min": -1}, {"num_checkpoints": 0}):
        with pytest.raises(AssertionError):
            WSDLrScheduler(sgd(), **{"total_steps": 10, **wrong})  # type: ignore[arg-type]
    for wrong in (
        {"num_epochs": 1, "num_update_steps_per_epoch": 10},
        {"total_steps": None, "num_epochs": 1},
        {"warmup_starting_lr": 1.5},
        {"num_checkpoints": 2, "decay_phase_ratio": 0.34},
    ):
        with pytest.raises(ValueError):
            WSDLrScheduler(sgd(), **{"total_steps": 10, **wrong})  # type: ignore[arg-type]
    assert WSDLrScheduler(sgd(), num_epochs=2, num_update_steps_per_epoch=5).total_steps == 10


def test_wsd_for_a_trainer() -> None:
    config = SimpleNamespace(num_epochs=4, num_update_steps_per_epoch=200, num_local_update_steps_per_epoch=100)
    trainer = SimpleNamespace(run_config=config)
    plain = replace_trainer_placeholder_values(trainer, WSDLrScheduler.create_scheduler_fn())(sgd())
    assert (plain.total_steps, plain.num_warmup_steps) == (400, 4)
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=2, num_checkpoints=2, lr_min=0.2)
    told = replace_trainer_placeholder_values(trainer, create)(sgd())
    assert (told.num_warmup_steps, told.checkpoint_steps, told.lr_min) == (200, [200, 400], 0.2)
