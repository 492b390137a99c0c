"""The acceptance cases of the accelerated Trainer under a core context, bare and of a master, by their numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.accelerated import assert_same
from support.ours import opened
from support.processes import until
from support.running_master import Running

torch = pytest.importorskip("torch")

from det_core import client, core  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import (  # noqa: E402
    EarlyStoppingCallback,
    StepBasedEvaluationCallback,
    TerminateOnNaNCallback,
    TrainerCallback,
    get_default_callbacks,
)
from det_core.accelerated.schedulers import CosineLrScheduler  # noqa: E402
from det_core.errors import CheckpointError  # noqa: E402
from det_core.journal import read_run  # noqa: E402

CONFIG = """
name: test
entrypoint: "true"
searcher: {{name: {name}, metric: {metric}, max_length: {length}{more}}}
hyperparameters: {{}}
max_restarts: 0
checkpoint_storage: {{type: directory, container_path: {store}}}
"""
UPDATES = 4
"""Updates in an epoch of :func:`train`."""


class Events(TrainerCallback):
    """Notes what ends; does something in the step before an update."""

    def __init__(self, at: int = 0, do: Any = None) -> None:
        self.names: list[str] = []
        self.updates: list[int] = []
        self._at, self._do = at, do

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        if trainer.updates_completed + 1 == self._at and self._do is not None:
            self._do()

    def on_update(self, trainer: Trainer, **kwargs: Any) -> None:
        self.updates.append(trainer.steps_completed)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.names.append("evaluated")

    def on_preempted(self, trainer: Trainer, **kwargs: Any) -> None:
        self.names.append("preempted")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.names.append("end")


def trainer(*callbacks: Any, lr: float = 0.05, width: int = 1, **more: Any) -> Trainer:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return Trainer(model, torch.nn.functional.mse_loss, optimizer, callbacks, **more)


def train(one: Trainer, epochs: int = 2, **more: Any) -> Trainer:
    rows = [(torch.tensor([i / 40]), torch.tensor([i / 20])) for i in range(40)]
    workers = {"num_workers": 0}
    options: dict[str, Any] = {
        "eval_dataset": rows[:10], "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(),
        "train_dataloader_kwargs": workers, "eval_dataloader_kwargs": workers, **more,
    }  # fmt: skip
    one.train(rows, epochs, per_device_batch_size=10, **options)
    return one


def rows_of(run_id: str, group: str) -> list[tuple[int, Any]]:
    return [(row.steps_completed, row.metrics) for row in read_run(client.run(run_id).path).rows(group)]


def saved(run_id: str) -> list[int]:
    with client.checkpoints(run=run_id) as found:
        return sorted(checkpoint.steps_completed for checkpoint in found)


# bare


def test_case_40_reports_of_epochs_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    with core.init() as ctx:
        one = trainer()
        train(one, 3, evaluate_every=3)
        one.evaluate()
        first = one.run_history.get_latest_metric("evaluation_loss")
        assert "Not reported" not in capsys.readouterr().out
        one.evaluate([(torch.ones(1), torch.zeros(1))] * 8)
        assert "Not reported, as there is a report of an evaluation at step 12 already: evaluation_loss\n" in (
            capsys.readouterr().out
        )
    training, validation = rows_of(ctx.run_id, "training"), rows_of(ctx.run_id, "validation")
    assert [step for step, _ in training] == [4, 8, 12]
    assert all({"train_loss_epoch", "learning_rate", "epoch", "samples_per_second"} == set(row) for _, row in training)
    assert [(step, sorted(row)) for step, row in validation] == [
        (3, ["intermediate_eval_loss"]), (4, ["eval_loss_epoch"]), (6, ["intermediate_eval_loss"]),
        (8, ["eval_loss_epoch"]), (9, ["intermediate_eval_loss"]), (12, ["eval_loss_epoch"]),
    ]  # fmt: skip
    ((step, row),) = rows_of(ctx.run_id, "evaluation")
    assert step == 12 and row["evaluation_loss"] == first
    assert saved(ctx.run_id) == [4, 8, 12]


def test_case_37_each_epoch_is_saved_and_a_resume_runs_the_rest_only() -> None:
    straight = train(trainer(), 3)
    for epochs in (2, 3):
        events = Events()
        with core.init(name="it", resume="latest") as ctx:
            other = train(trainer(events), epochs, create_scheduler_fn=COSINE_OF_3)
    assert events.updates == [9, 10, 11, 12] and saved(ctx.run_id) == [4, 8, 12]
    with core.init(name="straight") as ctx:
        straight = train(trainer(), 3, create_scheduler_fn=COSINE_OF_3)
    assert_same(dict(other.model.state_dict()), dict(straight.model.state_dict()))
    assert_same(other.run_history._metrics, straight.run_history._metrics)  # type: ignore[attr-defined]
    with core.init(name="it", resume="latest"):
        events = Events()
        again = train(trainer(events), 3, create_scheduler_fn=COSINE_OF_3)
    assert events.updates == [] and events.names == ["end"], "what had ended, ends"
    assert_same(dict(again.model.state_dict()), dict(other.model.state_dict()))


COSINE_OF_3 = CosineLrScheduler.create_scheduler_fn(total_num_epochs=3)


def test_case_36_a_checkpoint_of_the_core_is_plain_and_that_of_another_model_is_an_error() -> None:
    with core.init(name="it") as ctx:
        train(trainer(), 1)
    (checkpoint,) = (client.run(ctx.run_id).path / "checkpoints").glob("*/state.pt")
    state = torch.load(checkpoint, weights_only=True)
    assert list(state["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert state["optimizers"][0]["state"][0]["momentum_buffer"] is not None
    assert state["schedulers"][0]["num_updates"] == 3
    with core.init(name="it", resume="latest"), pytest.raises(CheckpointError, match="does not match"):
        train(trainer(width=2), 2)
    with core.init(name="it", resume="latest"), pytest.raises(CheckpointError, match="1 schedulers"):
        train(trainer(), 2, create_scheduler_fn=None)


def test_an_optimizer_of_another_kind_is_an_error() -> None:
    with core.init(name="it"):
        train(trainer(), 1)
    other = trainer()
    other.optimizer = torch.optim.Adam(other.model.parameters())
    with (
        core.init(name="it", resume="latest"),
        pytest.raises(CheckpointError, match="not that of Adam"),
    ):
        train(other, 2)


def test_batches_of_another_size_go_on_at_the_same_record(capsys: pytest.CaptureFixture[str]) -> None:
    with core.init(name="it") as ctx:
        assert train(trainer(Events(2, lambda: core_stop(ctx))), 1).preempted
    with core.init(name="it", resume="latest"):
        events = Events()
        one = trainer(events)
        one.train(
            [(torch.tensor([i / 40]), torch.tensor([i / 20])) for i in range(40)], 1, per_device_batch_size=4,
            create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(), train_dataloader_kwargs={"num_workers": 0},
        )  # fmt: skip
    assert events.updates == [3, 4, 5, 6, 7], "20 of 40 records are left"
    assert (
        "batches of 4 go on where 1 with batches of 10 were: at batch 5 of epoch 1, record 20"
        in capsys.readouterr().out
    )


def test_parameters_beside_the_model_are_told_of() -> None:
    one, head = trainer(), torch.nn.Linear(3, 2)
    one.optimizer.add_param_group({"params": head.parameters()})
    with core.init(name="it"), pytest.warns(UserWarning, match=r"2 parameter\(s\) .* such as one of shape \(2, 3\)"):
        train(one, 1)


def test_a_prefix_of_the_history_is_not_doubled_by_a_resume() -> None:
    names = []
    for epochs in (1, 2):
        with core.init(name="it", resume="latest"):
            one = trainer()
            one.run_history.set_metric_name_prefix("a_")
            train(one, epochs, evaluate_every=3)
            names.append(sorted(one.run_history.get_metric_names()))
    assert names[0] == names[1] == ["a_eval_loss_epoch", "a_train_loss_epoch"]


def test_what_has_ended_is_saved_and_a_stop_at_the_last_update_makes_no_more() -> None:
    with core.init(name="it", resume="latest") as ctx:
        events = Events(3, lambda: core_stop(ctx))
        assert train(trainer(events), max_num_train_steps=3).preempted
    for limit, updates, names in [
        (3, [], ["evaluated", "end"]), (7, [4, 5, 6, 7], ["evaluated", "end"]), (7, [], ["end"])
    ]:  # fmt: skip
        events = Events()
        with core.init(name="it", resume="latest") as ctx:
            train(trainer(events), max_num_train_steps=limit, checkpoint_every=7)
        assert events.updates == updates and events.names == names


def test_runs_of_one_script_are_resumed_each_in_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """Pre-training with a frozen layer, then fine-tuning; stopped in the first, and in the second."""

    def script(at: int = 0, run: int = 0, kill: bool = False) -> tuple[list[list[int]], Any]:
        with core.init(name=name, resume="latest") as ctx:
            do = (lambda: core_stop(ctx)) if not kill else _raise
            events = [Events(at if n == run else 0, do) for n in (1, 2)]
            one = trainer(events[0])
            one.model[0].requires_grad_(False)
            train(one, 2, checkpoint_every=1)
            one.model[0].requires_grad_(True)
            two = Trainer(
                one.model, one.loss_func, torch.optim.Adam(one.model.parameters(), lr=0.01), (events[1],),
                run_history=one.run_history,
            )  # fmt: skip
            train(two, 3, checkpoint_every=1, reset_run_history=False)
        return [e.updates for e in events], two

    name = "straight"
    updates, straight = script()
    assert updates == [list(range(1, 9)), list(range(9, 21))]
    name = "stopped"
    assert script(3, 1)[0] == [[1, 2, 3], []], "the second run does not begin in a process that is to stop"
    with pytest.raises(Killed):
        script(6, 2, kill=True)
    capsys.readouterr()
    updates, other = script(10, 2)
    assert "Training run 1 of this script had ended before" in capsys.readouterr().out
    assert updates == [[], [14, 15, 16, 17, 18]]
    updates, other = script()
    assert updates == [[], [19, 20]]
    assert_same(dict(other.model.state_dict()), dict(straight.model.state_dict()))
    assert_same(other.run_history._metrics, straight.run_history._metrics)
    assert_same(other.optimizer.state_dict(), straight.optimizer.state_dict())


class Killed(Exception):
    """Ends a script in the middle of a step."""


def _raise() -> None:
    raise Killed


def core_stop(ctx: core.Context) -> None:
    """As a signal does."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGUSR1)
    while not ctx.preempt.requested:
        pass


# under a master


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "home").mkdir(exist_ok=True)
    running = Running(tmp_path / "home", 100 << 20)
    try:
        yield running
    finally:
        running.close()


class Trial:
    """A trial of a master, whose script each :meth:`allocation` is.

    Args:
        master: the master.
        folder: where it keeps things.
        patch: sets variables.
        length: of the search.
        name, metric, more: of the searcher.
    """

    def __init__(
        self, master: Running, folder: Path, patch: pytest.MonkeyPatch, length: str, *, name: str = "single",
        metric: str = "eval_loss_epoch", more: str = "",
    ) -> None:  # fmt: skip
        text = CONFIG.format(name=name, metric=metric, length=length, more=more, store=folder / "store")
        self.master, self.folder, self.patch = master, folder, patch
        self.spec = replace(master.a_trial(text), master_url=master.url)
        self.experiment = self.spec.experiment_id

    def allocation(self, *callbacks: Any, epochs: int = 100, lr: float = 0.05, **more: Any) -> Trainer:
        """Train as the script of the allocation that runs would."""
        state = random.getstate()
        try:
            with opened(self.spec, self.folder, self.patch):
                return train(trainer(*callbacks, lr=lr), epochs, **more)
        finally:
            random.setstate(state)

    def again(self) -> None:
        """Return the next allocation after a pause."""
        self.master.end(self.spec.allocation_id)
        self.master.until(self.experiment, "STATE_PAUSED")
        assert self.master.ask("POST", f"experiments/{self.experiment}/activate").status == 200
        self.spec = replace(self.master.launched(self.experiment)[0], master_url=self.master.url)

    def pause(self, ctx: Any = None) -> None:
        """Pause the experiment, and wait until the trial knows."""
        assert self.master.ask("POST", f"experiments/{self.experiment}/pause").status == 200
        context = core.current_context()
        assert context is not None
        while not context.preempt.requested:
            pass

    def ends(self, state: str = "STATE_COMPLETED") -> Any:
        """Let the script exit, and return the experiment."""
        self.master.end(self.spec.allocation_id)
        return self.master.until(self.experiment, state)

    def checkpoints(self) -> list[int]:
        found = self.master.ask("GET", f"trials/{self.spec.trial_id}/checkpoints").json["checkpoints"]
        return sorted(c["metadata"]["steps_completed"] for c in found)

    def rows(self, group: str = "validation") -> list[tuple[int, Any]]:
        answer = self.master.ask("GET", f"trials/metrics/trial_metrics?trialIds={self.spec.trial_id}&group={group}")
        return sorted(
            (row["totalBatches"], row["metrics"]["avgMetrics"]) for part in answer.lines for row in part["metrics"]
        )

    def best(self) -> float:
        path = f"experiments/{self.experiment}/searcher/best_searcher_validation_metric"
        return float(self.master.ask("GET", path).json["metric"])


def test_case_39_preempted_at_update_7_and_resumed_at_8(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "straight").mkdir()
    whole = Trial(master, tmp_path / "straight", monkeypatch, "{epochs: 3}")
    events = Events()
    straight = whole.allocation(events)
    assert events.names == ["evaluated"] * 3 + ["end"] and whole.checkpoints() == [4, 8, 12]
    whole.ends()

    trial = Trial(master, tmp_path, monkeypatch, "{epochs: 3}")
    trial.spec = replace(trial.spec, trial_seed=whole.spec.trial_seed)
    events = Events(7, trial.pause)
    first = trial.allocation(events, checkpoint_every=None)
    assert first.preempted and events.updates == list(range(1, 8))
    assert events.names == ["evaluated", "preempted"] and trial.checkpoints() == [7]
    assert [step for step, _ in trial.rows()] == [4]
    trial.again()
    trial.spec = replace(trial.spec, trial_seed=whole.spec.trial_seed)
    events = Events(8, trial.pause)  # at an epoch's last update
    second = trial.allocation(events, checkpoint_every=None)
    assert second.preempted and events.updates == [8] and events.names == ["preempted"]
    trial.again()
    events = Events()
    third = trial.allocation(events, checkpoint_every=None)
    assert not third.preempted and events.updates == [9, 10, 11, 12]
    assert events.names == ["evaluated"] * 2 + ["end"], "the epoch's end, which was still to come, is made up for"
    assert trial.checkpoints() == [7, 8, 12]
    assert trial.rows() == whole.rows()
    assert_same(dict(third.model.state_dict()), dict(straight.model.state_dict()))
    assert_same(third.run_history._metrics, straight.run_history._metrics)  # type: ignore[attr-defined]
    trial.ends()


@pytest.mark.parametrize(
    ("length", "steps"), [("{epochs: 2}", [4, 8]), ("{batches: 6}", [4, 6]), ("{records: 60}", [4, 6])]
)
def test_case_41_the_length_of_an_operation_is_kept(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, steps: list[int]
) -> None:
    trial = Trial(master, tmp_path, monkeypatch, length)
    events = Events()
    one = trial.allocation(events)
    assert one.steps_completed == steps[-1] and events.updates[-1] == steps[-1]
    assert events.names[-1] == "end" and not one.preempted
    assert [step for step, _ in trial.rows()] == steps
    assert trial.checkpoints() == steps
    trial.ends()
    assert trial.best() == min(row["eval_loss_epoch"] for _, row in trial.rows()), trial.rows()


@pytest.mark.parametrize(("length", "rungs"), [("{epochs: 8}", (8, 16, 32)), ("{batches: 24}", (6, 12, 24))])
def test_case_41_rungs(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str, rungs: tuple[int, ...]
) -> None:
    """Trials train to their rung, and those that the search goes on with, further on, as if nothing had been; a rung
    may be in the middle of an epoch."""
    more = ", max_trials: 4, max_rungs: 3, divisor: 2, max_concurrent_trials: 1, mode: aggressive"
    trial = Trial(master, tmp_path, monkeypatch, length, name="adaptive_asha", more=more)
    trained: dict[int, list[int]] = {}
    last: dict[int, tuple[Trainer, int]] = {}
    options: dict[str, Any] = {"create_scheduler_fn": COSINE_OF_3}
    while True:
        spec, events = trial.spec, Events()
        one = trial.allocation(events, lr=0.02 * spec.trial_id, **options)
        trained.setdefault(spec.trial_id, []).extend(events.updates)
        last[spec.trial_id] = one, spec.trial_seed
        assert events.names[-1] == "end" and not one.preempted
        assert trial.checkpoints()[-1] == trained[spec.trial_id][-1] == one.steps_completed
        master.end(spec.allocation_id)

        def following(ended: str = spec.allocation_id) -> Any:
            found = [s for s in list(master.engine.running.values()) if s.allocation_id != ended]
            state = master.ask("GET", f"experiments/{trial.experiment}").json["experiment"]["state"]
            return found or (state if state.endswith("COMPLETED") else None)

        found = until(following)
        if isinstance(found, str):
            break
        trial.spec = replace(found[0], master_url=master.url)
    lengths = sorted(updates[-1] for updates in trained.values())
    assert len(lengths) == 4 and set(lengths) <= set(rungs) and lengths[0] == rungs[0] and lengths[-1] == rungs[-1]
    for trial_id, updates in trained.items():
        assert updates == list(range(1, updates[-1] + 1)), "each once"
        trial.spec = replace(trial.spec, trial_id=trial_id)
        reached = {rung for rung in rungs if rung <= updates[-1]}
        assert [step for step, _ in trial.rows()] == sorted({*range(UPDATES, updates[-1] + 1, UPDATES), *reached})
    number, (one, seed) = next((n, found) for n, found in last.items() if trained[n][-1] == rungs[-1])
    straight = trainer(lr=0.02 * number, seed=seed)
    train(straight, max_num_train_steps=rungs[-1], **options)
    assert_same(dict(one.model.state_dict()), dict(straight.model.state_dict()))


def test_case_41_early_stopping_completes_the_operation(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(master, tmp_path, monkeypatch, "{epochs: 8}")
    events = Events()
    one = trial.allocation(EarlyStoppingCallback(2), events, lr=0.0)
    assert one.run_history.current_epoch == 3 and events.updates[-1] == 12 and events.names[-1] == "end"
    assert trial.checkpoints() == [4, 8, 12]
    trial.ends()
    assert trial.best() == one.run_history.get_metric_values("eval_loss_epoch")[0]

    (tmp_path / "bound").mkdir()
    bound = Trial(master, tmp_path / "bound", monkeypatch, "{epochs: 8}")
    one = bound.allocation(epochs=3)
    assert one.steps_completed == 12
    assert "The search asks for 8 epochs: num_epochs=3 ends the training before" in capsys.readouterr().out
    bound.ends()


def test_plain_lines_in_order_for_a_masters_logs(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(master, tmp_path, monkeypatch, "{epochs: 1}")
    history = trial.allocation(*get_default_callbacks()).run_history
    printed = capsys.readouterr()
    assert [line.split("  ")[0] for line in printed.out.splitlines()] == [
        "Starting training run", "Starting epoch 1",
        "training: 4/4 batches", f"train_loss_epoch: {history.get_latest_metric('train_loss_epoch')}",
        "Starting eval epoch",
        "evaluation: 1/1 batches", f"eval_loss_epoch: {history.get_latest_metric('eval_loss_epoch')}",
        "Finishing training run",
    ]  # fmt: skip
    assert "batches/s" not in printed.err
    trial.ends()


def test_a_nan_says_that_the_trial_is_not_worth_repeating(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(master, tmp_path, monkeypatch, "{epochs: 8}")
    events = Events()
    one = trial.allocation(TerminateOnNaNCallback, events, lr=float("inf"))
    assert events.names == ["end"] and one.steps_completed <= 2 and trial.checkpoints() == []
    journals = "".join(path.read_text() for path in tmp_path.glob("journal-*/*.jsonl"))
    assert '"INVALID_HP"' in journals and '"searcher_metric"' not in journals, "the operation is not completed"
    trial.ends()


def test_step_based_evaluations_are_reported_where_they_are(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(master, tmp_path, monkeypatch, "{batches: 4}", metric="intermediate_eval_loss")
    with pytest.raises(ValueError, match="intermediate_eval_loss"):
        trial.allocation(StepBasedEvaluationCallback(2))
    assert [step for step, _ in trial.rows()] == [3, 4]
    master.end(trial.spec.allocation_id, 1)
    master.until(trial.experiment, "STATE_ERROR")


def test_another_trials_checkpoint_is_begun_from_and_not_gone_on_with(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Trial(master, tmp_path, monkeypatch, "{epochs: 2}")
    source = first.allocation(epochs=2)
    (checkpoint,) = (
        c["uuid"]
        for c in master.ask("GET", f"trials/{first.spec.trial_id}/checkpoints").json["checkpoints"]
        if c["metadata"]["steps_completed"] == 8
    )
    first.ends()
    second = Trial(master, tmp_path, monkeypatch, "{epochs: 1}", more=f", source_checkpoint_uuid: {checkpoint}")
    events = Events()
    began: list[Any] = []
    events.on_train_epoch_start = lambda trainer, **_: began.append(  # type: ignore[method-assign]
        {name: value.clone() for name, value in trainer.model.state_dict().items()}
    )
    second.allocation(events)
    assert "Begun with the model and the optimizer of another trial's checkpoint" in capsys.readouterr().out
    assert events.updates == [1, 2, 3, 4] and events.names == ["evaluated", "end"]
    assert_same(began[0], dict(source.model.state_dict()))
    second.ends()


class Kind(torch.Tensor):
    """A tensor of the user's own, whose class a checkpoint would have to import."""


class Odd(TrainerCallback):
    """Has a state that a checkpoint cannot hold, and records a number of numpy's."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it was not to be saved")

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("train_odd", np.float64(0.25))


@pytest.mark.parametrize(
    "state", [Path("here"), (i for i in ()), torch.ones(2).as_subclass(Kind), np.add], ids=lambda s: type(s).__name__
)
def test_state_that_cannot_be_read_back_is_left_out_and_told_of_once(
    caplog: pytest.LogCaptureFixture, state: Any
) -> None:
    with core.init(name="odd") as ctx:
        train(trainer(Odd(state)), 2)
    assert caplog.text.count("leaving the state of callback 'Odd' out of checkpoints") == 1
    with core.init(name="odd", resume=ctx.run_id):
        again = train(trainer(Odd(state)), 3)
    assert again.run_history.get_metric_values("train_odd") == [0.25] * 3


def multistep(optimizer: Any) -> Any:
    """Count milestones in a Counter, with numbers of numpy."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=np.float64(0.5))


def test_counters_and_numbers_of_numpys_are_gone_on_with(tmp_path: Path) -> None:
    def run(name: str, at: int = 0) -> Trainer:
        with core.init(name=name, resume="latest") as ctx:
            events = Events(at, lambda: core_stop(ctx))
            return train(trainer(events, lr=np.float64(0.05)), create_scheduler_fn=multistep)

    straight, stopped = run("straight"), run("stopped", 3)
    assert stopped.preempted
    resumed = run("stopped")
    assert_same(resumed.model.state_dict(), straight.model.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.0125
    straight.save_checkpoint(tmp_path / "c.pt", {"score": np.float32(0.5)})
    assert straight.load_checkpoint(tmp_path / "c.pt", load_scheduler=False)["score"] == 0.5


class Holding(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """Halves the rate at each update; its state has what no checkpoint can hold."""

    def __init__(self, optimizer: Any) -> None:
        self.function = lambda n: 0.5**n
        self.running = (i for i in ())
        self.where = Path("here")
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.function(self.last_epoch) * rate for rate in self.base_lrs]


def holding(optimizer: Any) -> Any:
    """Return a scheduler that contains such schedulers."""
    parts = [Holding(optimizer), Holding(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])


def test_training_whose_states_hold_objects_goes_on_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(name: str, at: int = 0) -> Trainer:
        with core.init(name=name, resume="latest") as ctx:
            one = trainer(Events(at, lambda: core_stop(ctx)))
            one.optimizer.param_groups[0]["note"] = print
            return train(one, 3, create_scheduler_fn=holding)

    straight, stopped = run("straight"), run("stopped", 3)
    assert stopped.preempted
    resumed = run("stopped")
    assert_same(resumed.model.state_dict(), straight.model.state_dict())
    assert resumed.optimizer.param_groups[0]["note"] is print
    assert "leaving schedulers.0._schedulers.0.function, schedulers.0._schedulers.0.run" in caplog.text
    assert "leaving optimizers.0.param_groups.0.note out of checkpoints, as it could not be read back" in caplog.text


def test_files_of_a_training_whose_states_hold_objects_are_read_back(tmp_path: Path) -> None:
    one = trainer()
    one.optimizer.param_groups[0]["note"] = print
    train(one, 1, create_scheduler_fn=holding)
    one.save_checkpoint(tmp_path / "c.pt", {"note": print, "score": 1})
    one.save_training_state(tmp_path / "state", {"note": print, "score": 1})
    other = trainer()
    other.optimizer.param_groups[0]["note"] = repr
    train(other, 0, create_scheduler_fn=holding)
    content = other.load_checkpoint(tmp_path / "c.pt")
    assert content["score"] == 1 and "note" not in content
    assert other.scheduler.last_epoch == one.scheduler.last_epoch == 4
    assert other.optimizer.param_groups[0]["note"] is repr
    again = trainer()
    assert again.load_training_state(tmp_path / "state") == {"current_epoch": 2, "score": 1}
