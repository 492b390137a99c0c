"""Faults: files made by hand, data that ends early, and changed settings."""

from __future__ import annotations

import gc
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from det_core import client, core  # noqa: E402
from det_core.accelerated import Trainer, _state  # noqa: E402
from det_core.accelerated.callbacks import TrainerCallback  # noqa: E402
from det_core.errors import CheckpointCorrupt, CheckpointError  # noqa: E402
from det_core.journal import read_run  # noqa: E402
from det_core.pytorch._original import load_weights  # noqa: E402
from support.threads import as_ranks  # noqa: E402
from support.trainings import a_trainer, evaluate, rows, same, train  # noqa: E402


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Runs:
    """Makes a file when its pickle is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", ["custom_checkpoint_0.pkl", "optimizer.bin", "trainer_state.pt", "trainer_metadata.pt"]
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_folder_made_by_hand_runs_no_code(
    tmp_path: Path, name: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proof = tmp_path / "state", tmp_path / "proof"
    trainer = train(a_trainer(), 1, create_scheduler_fn=halving)
    trainer.save_training_state(folder)
    if plain:
        (folder / name).write_bytes(pickle.dumps(Runs(proof), 2))
    else:
        torch.save(Runs(proof), folder / name)
    with pytest.raises(CheckpointError, match=r"could run code|is damaged"):
        train(a_trainer(), 2, create_scheduler_fn=halving, resume_from=folder)
    assert not proof.exists()
    if name == "custom_checkpoint_0.pkl" and not plain:
        monkeypatch.setenv("DET_CORE_ALLOW_PICKLE", "1")
        with pytest.raises((TypeError, AttributeError)):
            train(a_trainer(), 2, create_scheduler_fn=halving, resume_from=folder)
        assert proof.exists()


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_start_damaged_or_gone_is_replaced_by_the_one_before(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with core.init(name="it", retention=core.KeepLatest(9)) as context:
        straight = train(a_trainer(), 2)
        run_id = context.run_id
    with client.checkpoints(run=run_id) as checkpoints:
        newest = max(checkpoints, key=lambda one: one.steps_completed or 0)
        assert len(checkpoints) == 2 and newest.steps_completed == 8
    (path,) = client.run(run_id).path.glob(f"checkpoints/{newest.storage_id}/state.pt")
    if what == "gone":
        shutil.rmtree(path.parent)
    else:
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with core.init(name="it", resume="latest"):
        assert same(train(a_trainer(), 2), straight)
    said = capsys.readouterr()
    assert "Resumed at batch 0 of epoch 2, after 4 updates" in said.out
    assert "newer ones are passed over: " in said.err and newest.storage_id in said.err


class Ends(torch.utils.data.Dataset):  # type: ignore[misc]
    """Raises StopIteration at some record."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if i >= self.at:
            raise StopIteration
        return rows()[i]


def test_a_file_that_the_manifest_lacks_is_refused() -> None:
    with core.init(name="it") as context:
        train(a_trainer(), 1)
        run_id = context.run_id
    for folder in client.run(run_id).path.glob("checkpoints/*/"):
        (folder / "more.pth").touch()
    refused = pytest.raises(CheckpointCorrupt, match=r"holds more.pth, which its manifest does not list")
    with refused, core.init(name="it", resume="latest"):
        train(a_trainer(), 2)


def test_a_loader_that_ends_before_its_length() -> None:
    with pytest.raises(RuntimeError, match=r"the training loader gave 1 of 4 batches: .* StopIteration"):
        train(a_trainer(), 1, Ends(15), train_dataloader_kwargs={"shuffle": False})
    with pytest.raises(RuntimeError, match="the evaluation loader gave 2 of 4 batches"):
        evaluate(a_trainer(), Ends(25))


@pytest.mark.parametrize("damage", [b"", b"?" * 200, None])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "trainer_state.pt"])
def test_damaged_file_of_a_training_state_is_an_error_that_names_it(
    tmp_path: Path, name: str, damage: bytes | None
) -> None:
    trainer = train(a_trainer(), 1)
    trainer.save_training_state(tmp_path / "state")
    path = tmp_path / "state" / name
    path.write_bytes(path.read_bytes()[:-30] if damage is None else damage)
    with pytest.raises(CheckpointError, match=f"/state/{name} (is damaged|holds more)"):
        train(a_trainer(), 2, resume_from=tmp_path / "state")


def test_checkpoint_with_flipped_bits_loads_or_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    trainer = train(a_trainer(), 1)
    trainer.save_checkpoint(path)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        for load in (_state.load, load_weights):
            try:
                load(path)
            except CheckpointError as e:
                assert str(path) in str(e)


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": True}, {"drop_last": True}])
def test_no_batch_at_all(options: dict[str, Any]) -> None:
    data = rows(0) if "shuffle" in options else rows(7)
    with pytest.raises(RuntimeError, match="the training loader gives no batch: its dataset is empty, or smaller"):
        train(a_trainer(), 1, data, train_dataloader_kwargs=options)
    with pytest.raises(RuntimeError, match="the evaluation loader gives no batch"):
        train(a_trainer(), 1, eval_dataset=data, eval_dataloader_kwargs=options)


def test_a_stop_iteration_of_the_users_is_an_error() -> None:
    class Asks(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            next(iter(()))
            raise AssertionError

    with pytest.raises(StopIteration):
        evaluate(a_trainer(Asks))


def test_a_metric_that_only_computes_is_refused_before_anything_is_trained() -> None:
    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise AssertionError

    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="metric accuracy is a function: give one of torchmetrics"):
        Trainer(model, torch.nn.functional.mse_loss, None, metrics={"accuracy": accuracy})


def test_a_metric_of_many_elements() -> None:
    class Records(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_history.update_metric("train_small", torch.zeros(100, 100))
            trainer.run_history.update_metric("train_large", torch.zeros(100, 101))

    train(a_trainer(callbacks=[Records]))  # which reports nothing
    with pytest.raises(ValueError, match=r"train_large.* of 10,100 elements, .* its mean"), core.init():
        train(a_trainer(callbacks=[Records]))


def test_random_states_where_no_epoch_is_left() -> None:
    def drawn() -> Any:
        return torch.rand(1).item(), random.random()

    class Draws(TrainerCallback):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            torch.rand(3)
            random.random()

    with core.init(name="it"):
        train(a_trainer(callbacks=[Draws]), 2)
        first = drawn()
    with core.init(name="it", resume="latest"):
        train(a_trainer(callbacks=[Draws]), 2)
        assert drawn() == first


def test_changed_settings_are_told_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with core.init(name="it"):
        train(a_trainer(lr=0.1), 1)
    with core.init(name="it", resume="latest"):
        trainer = train(a_trainer(lr=0.5), 2)
    assert "this training goes on with lr=0.1 (given now: 0.5)\n" in capsys.readouterr().out
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1
    with core.init(name="it", resume="latest"):
        train(a_trainer(lr=0.5), 3)
    assert "lr=" not in capsys.readouterr().out, "told once"


def counting(by: int) -> Any:
    class Count(TrainerCallback):
        value = 0

        def on_update(self, trainer: Any, **kwargs: Any) -> None:
            self.value += by

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    return Count()


def test_callbacks_of_one_name_keep_their_own_states() -> None:
    for epochs in (1, 2):
        one, other = counting(1), counting(100)
        with core.init(name="it", resume="latest" if epochs == 2 else None):
            train(a_trainer(callbacks=[one, other]), epochs)
        assert (one.value, other.value) == (4 * epochs, 400 * epochs)


def evaluations(context: Any) -> list[int]:
    return [row.steps_completed for row in read_run(client.run(context.run_id).path).rows("evaluation")]


def test_an_evaluation_by_another_trainer_is_at_the_trainings_step() -> None:
    with core.init() as context:
        model = train(a_trainer(), 1).model
        evaluate(Trainer(model, torch.nn.functional.mse_loss, None, ()))
    assert evaluations(context) == [4]


class Leaves(TrainerCallback):
    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.steps_completed == 6 and (context := core.current_context()) is not None:
            context.preempt._request_stop("signal")


def test_an_evaluation_while_passing_over_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for start, resume in enumerate((None, "latest", "latest")):
        with core.init(name="it", resume=resume) as context:  # type: ignore[arg-type]
            trainer = train(a_trainer(callbacks=[Leaves] if start == 0 else ()))
            evaluate(trainer)
            train(trainer)
    assert evaluations(context) == [4]
    assert "Not reported, as this evaluation is of a training that had ended before" in capsys.readouterr().out


def test_a_stop_for_good_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            from det_core.accelerated.callbacks import StopTrainingError

            raise StopTrainingError("enough")

    for resume in (None, "latest"):
        with core.init(name="it", resume=resume):  # type: ignore[arg-type]
            train(a_trainer(callbacks=[Stops]), 3)
    assert "where it was stopped for good (to train anew: another name=, or det-core runs rm" in capsys.readouterr().out


def test_garbage_is_collected_where_that_frees_something(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, calls = train(a_trainer()), []
    monkeypatch.setattr(gc, "collect", lambda *args: calls.append(1) or 0)
    train(trainer)
    if not torch.cuda.is_available():
        assert calls == [] and len(trainer._accelerator._models) == 1
    assert same(trainer, train(train(a_trainer())))


def test_one_process_in_a_context_of_several_ranks_is_refused() -> None:
    in_turn = threading.Lock()  # accelerate's state is one for all threads while it is made

    def work(distributed: core.DistributedContext) -> None:
        said = r"the core context has 2 rank\(s\), and the model is trained by 1: accelerate finds ranks of torch's"
        with core.init(distributed=distributed) as context:
            with in_turn:
                trainer = a_trainer(core_context=context)
            with pytest.raises(ValueError, match=said):
                train(trainer)

    as_ranks(2, work)


def test_an_import_without_accelerate_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import det_core.accelerated"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "the accelerated Trainer needs accelerate" in last and "pip install" in last
