"""The acceptance cases of trials, by number, in one process: periods, stops, resumes, hooks, mistakes."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from det_core import client, core, pytorch  # noqa: E402
from det_core.errors import InternalException, InvalidExperimentException  # noqa: E402
from det_core.pytorch import Batch, Epoch, LRScheduler  # noqa: E402
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

    found = fit(Trial, 4, init={"searcher_metric": "val_loss"}, validation_period=Batch(1), checkpoint_policy="best")
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

    class OneOfTwo(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1))

    class NotReturned(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    for cls, message in ((Both, "it overrides both"), (Neither, "it overrides neither"), (NoModel, "wraps no model"),
                         (NoOptimizer, "wraps no optimizer"), (OneOfTwo, r"optimizer 2 of 2 .* of shape \(2, 3\)"),
                         (NotReturned, r"the return value of context\.wrap_optimizer\(\)")):  # fmt: skip
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


def test_what_a_bare_run_has_no_number_for() -> None:
    with built() as trial:
        context = trial.context
        assert (context.get_experiment_id(), context.get_trial_id(), context.get_initial_batch()) == (0, 0, 0)
        assert context.get_tensorboard_path().is_relative_to(client.run(context._core.run_id).path)
        with pytest.raises(InternalException, match="a bare run has no seed"):
            context.get_trial_seed()


def test_an_older_callbacks_epoch_start_has_no_parameter(caplog: pytest.LogCaptureFixture) -> None:
    class Older(pytorch.PyTorchCallback):
        count = 0

        def on_training_epoch_start(self) -> None:  # type: ignore[override]
            Older.count += 1

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"older": Older()}

    fit(Trial, 5)
    assert Older.count == 2 and caplog.text.count("lacks the parameter epoch_idx") == 1


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
    assert [r.levelname for r in caplog.records if "saving after every validation" in r.message] == ["INFO"]
    fit(Tiny, 1, checkpoint_policy="best")
    assert [r.levelname for r in caplog.records if "saving after every validation" in r.message] == ["INFO", "WARNING"]


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
