"""The acceptance cases of trials under a master, by their numbers: operations, policies, preemption."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from det_core import InvalidHP, core, pytorch
from det_core.core import SearcherOperation
from det_core.pytorch import Batch, Epoch
from support.ours import variables
from support.processes import until
from support.running_master import Running
from support.scripted_engine import Launched
from support.trials import Tiny, WithHooks

CONFIG = """
name: test
entrypoint: "true"
searcher: {{name: {name}, metric: {metric}, max_length: {length}{more}}}
hyperparameters: {hparams}
max_restarts: 0
checkpoint_storage: {{type: directory, container_path: {store}}}
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "home").mkdir(exist_ok=True)
    running = Running(tmp_path / "home", 100 << 20)
    try:
        yield running
    finally:
        running.close()


def launched(
    master: Running, folder: Path, length: str, *, hparams: str = "{}", name: str = "single", more: str = "",
    metric: str = "val_loss",
) -> Launched:  # fmt: skip
    text = CONFIG.format(name=name, metric=metric, length=length, more=more, hparams=hparams, store=folder / "store")
    return replace(master.a_trial(text), master_url=master.url)


def fit(spec: Launched, folder: Path, patch: pytest.MonkeyPatch, cls: type[Any] = Tiny, **options: Any) -> Any:
    """Fit a trial as the script of an allocation would."""
    random_state = random.getstate()
    given = variables(spec, folder)
    for name, value in given.items():
        patch.setenv(name, value)
    try:
        with pytorch.init() as context:
            trial = cls(context)
            pytorch.Trainer(trial, context).fit(**options)
        return trial
    finally:
        random.setstate(random_state)
        for name in given:
            patch.delenv(name)


def checkpoints(master: Running, spec: Launched) -> list[int]:
    found = master.ask("GET", f"trials/{spec.trial_id}/checkpoints").json["checkpoints"]
    return sorted(c["metadata"]["steps_completed"] for c in found)


def validations(master: Running, spec: Launched) -> list[int]:
    answer = master.ask("GET", f"trials/metrics/trial_metrics?trialIds={spec.trial_id}&group=validation")
    return sorted(row["totalBatches"] for part in answer.lines for row in part["metrics"])


def progress_told(patch: pytest.MonkeyPatch) -> list[float]:
    """Return the progress that operations report from now on."""
    told: list[float] = []
    tell = SearcherOperation.report_progress

    def noted(self: SearcherOperation, length: float) -> None:
        told.append(length)
        tell(self, length)

    patch.setattr(SearcherOperation, "report_progress", noted)
    return told


def test_case_03_progress_in_epochs(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trial(Tiny):
        records = 6

    told = progress_told(monkeypatch)
    spec = launched(master, tmp_path, "{epochs: 2}")
    options: dict[str, Any] = {"validation_period": Epoch(1), "reporting_period": Batch(2), "checkpoint_policy": "all"}
    fit(spec, tmp_path, monkeypatch, Trial, **options)
    assert told == [0, 1, 2] and validations(master, spec) == checkpoints(master, spec) == [3, 6]


def test_case_09_and_case_11_two_operations_and_the_best_so_far(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two trials the first is better after 2 batches, so it is handed a second operation, of 4."""

    class Trial(Tiny):
        records = 20
        values: Sequence[float] = (5.0, 6.0, 3.0, 3.0)

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"val_loss": self.values[self.context.current_train_batch()]}

    class Worse(Trial):
        values = (9.0, 9.0)

    more = ", num_rungs: 2, divisor: 2, max_trials: 2, max_concurrent_trials: 1"
    first = spec = launched(master, tmp_path, "{batches: 4}", name="async_halving", more=more)
    seen = []
    for cls in (Trial, Worse, Trial):
        trial = fit(spec, tmp_path, monkeypatch, cls, validation_period=Batch(1))
        seen.append(trial.seen)
        if cls is Worse:
            assert checkpoints(master, spec) == [2], "9 is not better than the best of the experiment"
        ended = spec.allocation_id
        master.end(ended)
        if len(seen) < 3:
            (spec,) = until(lambda: others(master, first.experiment_id, ended))  # noqa: B023
            spec = replace(spec, master_url=master.url)
    assert spec.trial_id == first.trial_id
    assert seen[0] + seen[2] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], "batches 0 to 3 once"
    assert validations(master, first) == [1, 2, 3, 4]
    assert checkpoints(master, first) == [1, 2, 3, 4], "best, end, best, end"
    master.until(first.experiment_id, "STATE_COMPLETED")
    best = master.ask("GET", f"experiments/{first.experiment_id}/searcher/best_searcher_validation_metric").json
    assert best["metric"] == 3.0
    values = master.ask("GET", f"trials/{first.trial_id}").json["trial"]
    assert values["latestValidation"]["metrics"]["avgMetrics"]["val_loss"] == 3.0


def others(master: Running, experiment_id: int, allocation_id: str) -> list[Launched]:
    """Return the running allocations of an experiment except one."""
    return [s for s in master.launched(experiment_id) if s.allocation_id != allocation_id]


def test_case_12_an_operation_in_records(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = progress_told(monkeypatch)
    spec = launched(master, tmp_path, "{records: 8}", hparams="{global_batch_size: 2}")
    trial = fit(spec, tmp_path, monkeypatch, reporting_period=Batch(3))
    assert len(trial.seen) == 4 and told == [6, 8]


def test_case_13_units_that_are_missing(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path, "{records: 8}")
    with pytest.raises(ValueError, match="no global_batch_size"):
        fit(spec, tmp_path, monkeypatch)
    spec = launched(master, tmp_path, "8")
    with pytest.raises(ValueError, match="has no unit"):
        fit(spec, tmp_path, monkeypatch)
    trial = fit(spec, tmp_path, monkeypatch, max_length=Batch(3))
    assert len(trial.seen) == 8, "the searcher rules, in the unit of max_length"


@pytest.mark.parametrize("value", ["missing", [1.0]])
def test_case_14_no_searcher_metric(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    class Trial(Tiny):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"other": 1.0} if value == "missing" else {"val_loss": value}

    spec = launched(master, tmp_path, "{batches: 2}")
    with pytest.raises(RuntimeError, match="'val_loss'"):
        fit(spec, tmp_path, monkeypatch, Trial)
    assert validations(master, spec) == [2], "it is reported first"


def pausing(master: Running, spec: Launched, at: int) -> type[Tiny]:
    """Return a trial whose experiment is paused during its batch ``at``."""

    class Trial(WithHooks):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == at:
                pause(master, spec, self)
            return {"loss": loss}

    return Trial


def pause(master: Running, spec: Launched, trial: Tiny) -> None:
    """Pause a trial's experiment, and wait until the trial knows."""
    assert master.ask("POST", f"experiments/{spec.experiment_id}/pause").status == 200
    assert until(lambda: trial.context._core.preempt.requested)


def again(master: Running, spec: Launched) -> Launched:
    """Return the next allocation of a paused trial."""
    master.end(spec.allocation_id)
    master.until(spec.experiment_id, "STATE_PAUSED")
    assert master.ask("POST", f"experiments/{spec.experiment_id}/activate").status == 200
    return replace(master.launched(spec.experiment_id)[0], master_url=master.url)


def test_case_15_and_case_20_preempted_at_the_end_of_training(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = launched(master, tmp_path, "{batches: 3}")
    first = fit(spec, tmp_path, monkeypatch, pausing(master, spec, 2))
    assert len(first.seen) == 3 and checkpoints(master, spec) == [3] and validations(master, spec) == []
    next_one = again(master, spec)
    second = fit(next_one, tmp_path, monkeypatch, WithHooks)
    assert second.seen == [] and validations(master, spec) == [3]
    master.end(next_one.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")


def test_case_16_preempted_after_a_validation(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path, "{batches: 4}")

    class Trial(Tiny):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            pause(master, spec, self)
            return super().evaluate_batch(batch, batch_idx)

    trial = fit(spec, tmp_path, monkeypatch, Trial, validation_period=Batch(2), checkpoint_policy="none")
    assert trial.events == ["b0", "b1", "e0"]
    assert (validations(master, spec), checkpoints(master, spec)) == ([2], [2])


def test_case_18_preempted_and_resumed(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Long:
        records = 40

    spec = launched(master, tmp_path, "{batches: 5}")
    first = fit(spec, tmp_path, monkeypatch, type("Trial", (Long, pausing(master, spec, 2)), {}))
    assert [e for e in first.events if isinstance(e, str)] == ["b0", "b1", "b2"]
    next_one = again(master, spec)
    assert next_one.latest_checkpoint is not None
    second = fit(next_one, tmp_path, monkeypatch, type("Trial", (Long, WithHooks), {}))
    assert second.events[0] == ("on_trial_startup", 3, next_one.latest_checkpoint)
    assert [e for e in second.events if isinstance(e, str) and e[0] == "b"] == ["b3", "b4"]
    assert second.seen == [[6.0, 7.0], [8.0, 9.0]]
    master.end(next_one.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")


def test_a_straight_trial_and_a_paused_one_are_equal(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shuffled:
        records, shuffle = 30, True

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    spec = launched(master, tmp_path / "a", "{batches: 9}")
    straight = fit(spec, tmp_path / "a", monkeypatch, type("Trial", (Shuffled, Tiny), {}))
    spec = launched(master, tmp_path / "b", "{batches: 9}")
    spec = replace(spec, trial_seed=straight.context.get_trial_seed())
    paused = fit(spec, tmp_path / "b", monkeypatch, type("Trial", (Shuffled, pausing(master, spec, 4)), {}))
    next_one = replace(again(master, spec), trial_seed=spec.trial_seed)
    rest = fit(next_one, tmp_path / "b", monkeypatch, type("Trial", (Shuffled, Tiny), {}))
    assert paused.seen + rest.seen == straight.seen
    assert rest.weights == straight.weights


def test_mistakes_in_a_trial_of_an_experiment(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path, "{batches: 2}")
    with pytest.raises(ValueError, match="test_mode=True"):
        fit(spec, tmp_path, monkeypatch, test_mode=True)
    with pytest.raises(ValueError, match=r"pass name= to its core\.init"):
        with core.init():
            with pytorch.init(name="x"):
                pass


def test_case_57_invalid_hyperparameters_end_the_trial(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise InvalidHP("too wide")
            return {"loss": loss}

    spec = launched(master, tmp_path, "{batches: 4}")
    with pytest.raises(SystemExit) as e:
        fit(spec, tmp_path, monkeypatch, Trial)
    assert e.value.code == 0 and checkpoints(master, spec) == [2]
    master.end(spec.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("what", ["damaged", "gone", "damaged after init"])
def test_start_damaged_or_gone_is_replaced_by_the_one_before(
    what: str, named: bool, master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The master hands over the same one at every restart, and scripts of Determined name it."""
    spec = launched(master, tmp_path, "{batches: 6}")
    options: dict[str, Any] = {"checkpoint_period": Batch(1)}
    fit(spec, tmp_path, monkeypatch, pausing(master, spec, 3), **options)
    assert checkpoints(master, spec) == [1, 2, 3, 4]
    next_one = again(master, spec)
    newest = tmp_path / "store" / str(next_one.latest_checkpoint)

    def damage() -> None:
        if what == "gone":
            shutil.rmtree(newest)
            return
        content = bytearray((newest / "state_dict.pth").read_bytes())
        content[len(content) // 2] ^= 1
        (newest / "state_dict.pth").chmod(0o644)
        (newest / "state_dict.pth").write_bytes(content[:-1] if what == "damaged after init" else content)

    class Asks(WithHooks):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            if what == "damaged after init":
                damage()
                return
            self.events += [context.get_initial_batch(), context.latest_checkpoint != next_one.latest_checkpoint]

    if what != "damaged after init":
        damage()
    if named:
        options["latest_checkpoint"] = next_one.latest_checkpoint
    rest = fit(next_one, tmp_path, monkeypatch, Asks, **options)
    if what != "damaged after init":
        assert rest.events[:2] == [3, True]
        del rest.events[:2]
    assert [e for e in rest.events if isinstance(e, str) and e[0] == "b"] == ["b3", "b4", "b5"]
    assert rest.events[0][1] == 3 and rest.events[0][2] != next_one.latest_checkpoint
    assert rest.context.get_initial_batch() == 3
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "newer ones are passed over: " in line]
    assert str(next_one.latest_checkpoint) in said
