"""Mistakes and faults that once went by in silence, or ended a trial in a line that told nobody why."""

from __future__ import annotations

import gc
import json
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from det_core import client, core, pytorch  # noqa: E402
from det_core.errors import CheckpointError  # noqa: E402
from det_core.pytorch import Batch  # noqa: E402
from support.trials import Numbers, Tiny, built, fit, resumed  # noqa: E402


class Ending(Numbers):
    """Ends as an iterator does, after four records."""

    def __getitem__(self, i: int) -> Any:
        if i >= 4:
            raise StopIteration
        return super().__getitem__(i)


@pytest.mark.parametrize("at", [0, 1])
def test_a_stop_iteration_of_evaluate_batch_is_an_error(at: int) -> None:
    """It ended the validation as if the loader were over: the metric was of the batches before."""

    class Trial(Tiny):
        validation_records = 8

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"v": next(iter([])) if batch_idx == at else 1.0}

    with pytest.raises(StopIteration):
        fit(Trial, 1)
    assert client.run("latest").state == "failed"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_validation_loader_that_ends_early_is_an_error(workers: int) -> None:
    class Trial(Tiny):
        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(Ending(), batch_size=2, num_workers=workers)

    with pytest.raises(RuntimeError, match=r"validation loader ended after 2 of 4 batches"):
        fit(Trial, 1)
    gc.collect()  # the error's traceback, which holds on to the worker


def test_a_batch_sampler_of_the_users_may_not_know_its_length() -> None:
    class Guessing:
        def __len__(self) -> int:
            return 9

        def __iter__(self) -> Any:
            return iter([[0, 1], [2]])

    class Trial(Tiny):
        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(), batch_sampler=Guessing())

    assert fit(Trial, 1).trial.events == ["b0", "e0", "e1"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_training_loader_that_ends_early_is_an_error(ours: bool) -> None:
    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            if ours:
                return pytorch.DataLoader(Ending(), batch_size=2)
            self.context.experimental.disable_dataset_reproducibility_checks()
            return torch.utils.data.DataLoader(Ending(), batch_size=2)

    with pytest.raises(RuntimeError, match=r"training loader ended( after 2 of 4 batches)?: its dataset raised Stop"):
        fit(Trial, 8)


def test_an_empty_dataset_is_told_of_when_training_begins() -> None:
    """Shuffled, it was torch's ``num_samples should be a positive integer value``."""

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(0), batch_size=2, shuffle=True)

    with pytest.raises(RuntimeError, match="the training loader has no batch: its dataset is empty"):
        fit(Trial, 1)


def test_a_huge_tensor_is_no_metric() -> None:
    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return {"loss": loss, "logits": torch.zeros(200, 100)}

    with pytest.raises(ValueError, match=r'metrics\["logits"\] is .* of 20,000 elements.*report a number'):
        fit(Trial, 1)


def test_random_states_are_put_back_where_nothing_is_left_to_train() -> None:
    def drawn() -> list[float]:
        return [random.random(), torch.rand(1).item()]

    fit(Tiny, 3, init={"name": "r"})
    expected = drawn()
    fit(Tiny, 3, init={"name": "r", "resume": "latest"})
    assert drawn() == expected


@pytest.mark.parametrize("state", [threading.Lock(), (i for i in ())], ids=["lock", "generator"])
def test_callback_state_that_cannot_be_saved_is_left_out_and_told_of_once(
    state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Holding(pytorch.PyTorchCallback):
        """Counts batches, and holds what cannot be saved from the second checkpoint on."""

        seen = 0

        def state_dict(self) -> dict[str, Any]:
            self.seen += 1
            return {"state": state if self.seen > 1 else 0}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError("it was not to be saved")

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"holding": Holding()}

    fit(Trial, 3, init={"name": "r"}, checkpoint_period=pytorch.Batch(1))
    assert caplog.text.count("leaving the state of callback 'holding' out of checkpoints, as it could not be read") == 1
    assert "pickle" in caplog.text
    assert fit(Trial, 4, init={"name": "r", "resume": "latest"}).trial.events[0] == "b3"
    assert "callback 'holding' has a load_state_dict(), but the checkpoint has no state for it" in caplog.text


class Described(torch.nn.Linear):  # type: ignore[misc]
    """Its state has an object beside the weights."""

    note: Any = Path("saved")

    def get_extra_state(self) -> Any:
        return {"note": self.note, "size": self.in_features}

    def set_extra_state(self, state: Any) -> None:
        assert state["size"] == self.in_features
        self.note = state["note"]


class Halving(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """Its state has what no checkpoint can hold."""

    def __init__(self, optimizer: Any) -> None:
        self.function = lambda n: 0.5**n
        self.running = (i for i in ())
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.function(self.last_epoch) * rate for rate in self.base_lrs]


class Holder(Tiny):
    """Everything that it trains with has such a state."""

    def build(self) -> torch.nn.Module:
        return Described(1, 1)

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.optimizer.param_groups[0]["note"] = print
        mode = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        self.scheduler = context.wrap_lr_scheduler(Halving(self.optimizer), mode)

    def build_callbacks(self) -> Any:
        return {"adding": Adding()}


class Adding(pytorch.PyTorchCallback):
    """Adds to checkpoints what they cannot hold."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"lock": threading.Lock(), "number": 7}

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == {"number": 7}


def test_fit_whose_states_hold_objects_goes_on_exactly(caplog: pytest.LogCaptureFixture) -> None:
    straight = fit(Holder, 5)
    fit(Holder, 3, init={"name": "r"})
    resumed = fit(Holder, 5, init={"name": "r", "resume": "latest"})
    assert resumed.trial.events[0] == "b3"
    assert resumed.trial.weights == straight.trial.weights
    assert resumed.trial.scheduler.last_epoch == straight.trial.scheduler.last_epoch
    assert resumed.trial.optimizer.param_groups[0]["note"] is print
    loaded = pytorch.load_trial_from_checkpoint_path(resumed.folder(), trial_class=Holder)
    assert loaded.weights == straight.trial.weights
    for part in (
        "lr_schedulers_state_dict.0.function, lr_schedulers_state_dict.0.running",
        "optimizers_state_dict.0.param_groups.0.note",
        "models_state_dict.0._extra_state.note",
        "mine.lock",
    ):
        assert f"leaving {part} out of checkpoints, as it could not be read back" in caplog.text


class Thing:
    pass


def test_what_a_callbacks_state_may_not_hold_is_told_in_our_words(caplog: pytest.LogCaptureFixture) -> None:
    class Holding(pytorch.PyTorchCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"thing": Thing()}

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"holding": Holding()}

    fit(Trial, 1)
    (told,) = [r.getMessage() for r in caplog.records if "'holding'" in r.getMessage()]
    assert f"could not be read back ({Thing.__module__}.Thing): use tensors" in told and "\x1b" not in told


def test_a_pickle_that_runs_code_is_refused_in_our_words(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("run",)

    folder = fit(Tiny, 1).folder()
    (folder / "state_dict.pth").unlink()
    torch.save({"models_state_dict": Evil()}, folder / "state_dict.pth")
    with pytest.raises(
        CheckpointError, match=r"refusing to load .*more than weights, \S*print, and would run code"
    ) as e:
        pytorch.load_trial_from_checkpoint_path(folder, trial_class=Tiny)
    assert "weights_only" in str(e.value) and "[1m" not in str(e.value)


def test_counters_that_are_no_dictionary(tmp_path: Path) -> None:
    from det_core.pytorch._original import read_counters

    (tmp_path / "workload_sequencer.pkl").write_bytes(pickle.dumps(7, protocol=2))
    with pytest.raises(CheckpointError, match="counters are a int, not a dictionary"):
        read_counters(tmp_path)


def test_changed_hyperparameters_are_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint's optimizer rules, so that the new learning rate would be without effect."""
    fit(Tiny, 1, init={"name": "r", "hparams": {"lr": 1e-5, "same": [1]}})
    fit(Tiny, 2, init={"name": "r", "resume": "latest", "hparams": {"lr": 1e-6, "same": [1]}})
    (told,) = [r.getMessage() for r in caplog.records if "hyperparameters differ" in r.getMessage()]
    assert "lr was 1e-05 and is 1e-06" in told and "same" not in told


def test_two_fits_of_a_script_are_told_apart() -> None:
    """A checkpoint of the second was put into the first, which trained on it, and the second began anew."""

    class Trial(Tiny):
        stopping = True

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if self.stopping and self.context._fits == 2 and batch_idx == 2:
                self.context.set_stop_requested(True)
            return {"loss": loss}

    def script(trial: Any) -> list[Any]:
        seen = []
        for length in (4, 6):
            trial.events.clear()
            pytorch.Trainer(trial, trial.context).fit(max_length=Batch(length), checkpoint_period=Batch(1))
            seen.append([e for e in trial.events if e[0] == "b"])
        return [seen, trial.weights]

    def start(name: str, stopping: bool) -> list[Any]:
        with built(Trial, name=name, resume="latest") as trial:
            trial.stopping = stopping
            return script(trial)

    [_, expected] = start("straight", False)
    [seen, _] = start("stopped", True)
    assert seen == [["b0", "b1", "b2", "b3"], ["b0", "b1", "b2"]]
    [seen, weights] = start("stopped", False)
    assert seen == [[], ["b3", "b4", "b5"]] and weights == expected
    with client.checkpoints(run=client.run("latest").run_id) as found:
        assert max(c.steps_completed for c in found) == 10
    assert start("stopped", False)[0] == [[], []], "once all is trained, nothing is"


def test_after_a_preemption_the_next_fit_waits_for_the_resume() -> None:
    """It trained a batch and saved that, so that the one that was stopped would have counted as ended."""

    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if self.stopping and batch_idx == 1:
                self.context._core.preempt._request_stop("signal")
            return {"loss": loss}

    seen = []
    for stopping in (True, False):
        with built(Trial, name="r", resume="latest") as trial:
            trial.stopping = stopping
            for length in (4, 2):
                pytorch.Trainer(trial, trial.context).fit(max_length=Batch(length))
        seen.append([e for e in trial.events if e[0] == "b"])
    assert seen == [["b0", "b1"], ["b2", "b3", "b0", "b1"]]


def test_a_checkpoint_without_a_number_is_of_the_first_fit() -> None:
    before, _ = resumed(2, 2)
    for folder in (before.run.path / "checkpoints").iterdir():
        if (path := folder / "trial_state.json").is_file():
            told = json.loads(path.read_text())
            assert told.pop("fit") == 1 and told.pop("batches_before") == 0
            assert pickle.loads((folder / "trial_state.pkl").read_bytes()).keys() == {
                "trial_id", "batches_trained", "epochs_trained", "last_val", "last_ckpt", "step_id",
            }, "the original takes no other names"  # fmt: skip
            from det_core.pytorch._checkpoint import read_progress

            path.write_text(json.dumps(told))
            assert read_progress(folder)[0].fit == 1


def test_options_are_compared_as_texts() -> None:
    class Odd:
        def __contains__(self, n: object) -> bool:
            return False

    from det_core.pytorch._runner import FitOptions

    options = FitOptions(Batch([1, 2]), Batch(Odd()), Batch(3), None, "all", None, False, False, False)  # type: ignore[arg-type]
    told = options.by_name()
    assert told["fit(checkpoint_period=)"] == "Batch(value=[1, 2])"
    assert told["fit(validation_period=)"].endswith("Odd object>)"), "without its address"


def test_invalid_hyperparameters_tell_of_their_checkpoint() -> None:
    from det_core import InvalidHP

    told: list[str] = []

    class Telling(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            told.append(uuid)

    class Trial(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            raise InvalidHP("too wide")

        def build_callbacks(self) -> Any:
            return {"telling": Telling()}

    class Second(Trial):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            return loss if batch_idx == 0 else super().metrics(loss, batch_idx)

    with pytest.raises(SystemExit):
        fit(Second, 3)
    with client.checkpoints(run=client.run("latest").run_id) as found:
        assert told == [c.storage_id for c in found]


def test_names_beside_the_api_that_trials_read() -> None:
    with built() as trial:
        loader = trial.build_training_data_loader()
        assert isinstance(loader.sampler, torch.utils.data.SequentialSampler) and loader.pin_memory is False
        assert callable(loader.collate_fn) and not hasattr(loader, "nothing_of_the_kind")
        assert trial.context._aggregation_frequency == 1 and trial.context._current_batch_idx is None


def test_an_epoch_is_a_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Tiny, pytorch.Epoch(2), validation_period=pytorch.Epoch(1), reporting_period=pytorch.Epoch(1))
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert first.startswith("epoch 1: 4/8 batches  training loss ") and "  validation val_loss " in first
    assert second.startswith("epoch 2: 8/8 batches  training loss ")


def test_the_end_is_a_line_in_the_middle_of_an_epoch_too(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Tiny, pytorch.Batch(6))
    first, last = [line for line in capsys.readouterr().err.splitlines() if " batches" in line]
    assert first == "epoch 1: 4/6 batches"
    assert last.startswith("end: 6/6 batches  training loss ") and "  validation val_loss " in last


def test_a_trial_has_its_seed_and_id_from_one_place() -> None:
    with core.init() as ctx:
        assert ctx.trial is None
