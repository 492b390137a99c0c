"""Checkpoints of trials: what they hold, who may add to them, and what is read back of which; cases 23 to 27 and 58."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_core import InvalidHP, core, pytorch  # noqa: E402
from det_core.client._pack import pack  # noqa: E402
from det_core.errors import CheckpointCorrupt, CheckpointError  # noqa: E402
from det_core.pytorch import _checkpoint  # noqa: E402
from support.trials import Numbers, Tiny, WithHooks, built, fit, resumed  # noqa: E402


def test_case_23_files_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_def.py").write_text("x = 1")

    class Trial(Tiny):
        code_files = ("model_def.py",)

        def __init__(self, context: Any) -> None:
            context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))
            super().__init__(context)

        def build_callbacks(self) -> Any:
            class Stateful(pytorch.PyTorchCallback):
                def state_dict(self) -> dict[str, Any]:
                    return {"x": 1}

            return {"mine": Stateful()}

    found = fit(Trial, 4, init={"exp_conf": {"a": 1}, "hparams": {"lr": 1}})
    folder = found.folder()
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {"state_dict.pth", "trial_state.json", "trial_state.pkl", "load_data.json", "rng_rank0.pth"} <= names
    assert (folder / "code" / "model_def.py").read_text() == "x = 1"
    state = torch.load(folder / "state_dict.pth", weights_only=True)
    assert set(state) == {
        "models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict", "callbacks", "rng_state",
        "scaler_state_dict",
    }  # fmt: skip
    assert state["callbacks"] == {"mine": {"x": 1}}
    told = json.loads((folder / "trial_state.json").read_text())
    assert told["batches_trained"] == 4 and told["position"]["records"] == 0 and told["position"]["pass"] == 1
    assert pickle.loads((folder / "trial_state.pkl").read_bytes())["batches_trained"] == 4
    load_data = json.loads((folder / "load_data.json").read_text())
    assert load_data["trial_type"] == "PyTorchTrial" and load_data["is_trainer"] is True
    assert (load_data["hparams"], load_data["experiment_config"]) == ({"lr": 1}, {"a": 1})
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["steps_completed"] == 4 and metadata["format"] == "pickle"
    assert metadata["framework"] == f"torch-{torch.__version__}" and metadata["determined_version"]


def test_case_24_hooks_add_keys_and_files() -> None:
    loaded: list[Any] = []

    class Adding(pytorch.PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 42

        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            loaded.append(checkpoint["mine"])

        def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
            (Path(checkpoint_dir) / "mine.txt").write_text("mine")

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"adding": Adding()}

    before, _ = resumed(2, 3, Trial)
    assert loaded == [42] and (before.folder(2) / "mine.txt").read_text() == "mine"


def test_case_25_states_of_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(pytorch.PyTorchCallback):
        count = 0

        def on_training_epoch_end(self, epoch_idx: int) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    class Trial(Tiny):
        name = "counting"

        def build_callbacks(self) -> Any:
            self.callback = Counting()
            return {self.name: self.callback}

    _, after = resumed(8, 12, Trial)
    assert after.trial.callback.count == 3

    class Renamed(Trial):
        name = "renamed"

    again = fit(Renamed, 16, init={"name": "r", "resume": "latest"})
    assert again.trial.callback.count == 1 and "callback 'renamed' has a load_state_dict()" in caplog.text


def test_case_26_what_cannot_be_restored() -> None:
    class Wider(Tiny):
        def build(self) -> Any:
            return torch.nn.Linear(2, 1)

    fit(Tiny, 2, init={"name": "r"})

    class Adaptive(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.optimizers[:] = [torch.optim.Adam(self.model.parameters())]

    for cls, message in (Wider, "does not match(?s:.*)size mismatch"), (Adaptive, "not that of Adam: it lacks step"):
        with pytest.raises(CheckpointError, match=message):
            fit(cls, 4, init={"name": "r", "resume": "latest"})
    with core.init(name="other") as ctx:
        with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "something").write_text("else")
    with pytest.raises(CheckpointError, match=r"expected one of state_dict.pth.*found .*something"):
        fit(Tiny, 4, init={"name": "other", "resume": "latest"})


def original(folder: Path, trial: Tiny) -> None:
    """Write a checkpoint as Determined 0.36 does."""
    state = {
        "models_state_dict": [{f"module.{k}": v for k, v in trial.model.state_dict().items()}],
        "optimizers_state_dict": [trial.optimizer.state_dict()],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
        "rng_state": {
            "cpu_rng_state": torch.random.get_rng_state(), "np_rng_state": np.random.get_state(),
            "random_rng_state": (3, tuple(range(624)) + (624,), None),
        },
    }  # fmt: skip
    torch.save(state, folder / "state_dict.pth", pickle_module=pickle)
    counters = {
        "trial_id": 0, "batches_trained": 3, "epochs_trained": 0, "last_val": 0, "last_ckpt": 3, "step_id": 0,
    }  # fmt: skip
    (folder / "trial_state.pkl").write_bytes(pickle.dumps(counters))
    told = {"trial_type": "PyTorchTrial", "experiment_config": None, "hparams": None, "is_trainer": True,
            "trial_cls_spec": "support.trials:Tiny"}  # fmt: skip
    (folder / "load_data.json").write_text(json.dumps(told))


def test_case_27_a_checkpoint_of_the_original() -> None:
    with built() as trial:
        for p in trial.model.parameters():
            torch.nn.init.constant_(p, 7.0)
        with trial.context._core.checkpoint.store_path({"steps_completed": 3}) as (path, storage_id):
            original(path, trial)
        run_id = trial.context._core.run_id

    class Trial(WithHooks):
        records = 20

    after = fit(Trial, 5, init={"resume": run_id}, latest_checkpoint=storage_id)
    assert after.trial.seen == [[6.0, 7.0], [8.0, 9.0]]
    assert after.trial.events[0] == ("on_trial_startup", 3, storage_id)
    loaded = pytorch.load_trial_from_checkpoint_path(after.folder(3), trial_class=Tiny)
    assert loaded.weights == [7.0, 7.0]


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("where", ["state_dict.pth", "trial_state.pkl"])
def test_case_27_pickles_that_run_code_do_not(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with built() as trial:
        with trial.context._core.checkpoint.store_path({"steps_completed": 3}) as (path, storage_id):
            original(path, trial)
            if where == "state_dict.pth":
                torch.save({"models_state_dict": [], "bomb": Bomb()}, path / where)
            else:
                (path / where).write_bytes(pickle.dumps({"batches_trained": Bomb()}))
        run_id = trial.context._core.run_id
    with pytest.raises(CheckpointError, match="refusing to load"):
        fit(Tiny, 5, init={"resume": run_id}, latest_checkpoint=storage_id)
    assert not (tmp_path / "exploded").exists()


def test_case_58_loading_for_inference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = fit(Tiny, 3, init={"hparams": {"a": 5, "path": tmp_path, "n": np.int64(3)}})
    folder = found.folder()
    trial = pytorch.load_trial_from_checkpoint_path(str(folder))
    assert isinstance(trial, Tiny) and trial.weights == found.trial.weights
    assert trial.context.get_hparams() == {"a": 5, "path": str(tmp_path), "n": 3}
    assert isinstance(trial.context, pytorch.CheckpointLoadContext)
    given = pytorch.load_trial_from_checkpoint_path(folder, trial_class=WithHooks, map_location="cpu")
    assert type(given) is WithHooks and "deprecated: use torch_load_kwargs" in caplog.text

    class Watching(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.writer = context.get_tensorboard_writer()
            context.set_profiler()

    watching = pytorch.load_trial_from_checkpoint_path(folder, trial_class=Watching)
    assert isinstance(watching, Watching) and watching.weights == trial.weights
    watching.writer.close()
    with pytest.raises(ValueError, match="pass map_location in"):
        pytorch.load_trial_from_checkpoint_path(folder, torch_load_kwargs={}, map_location="cpu")
    with pytest.raises(AssertionError, match=r"neither load_data\.json nor metadata\.json"):
        pytorch.load_trial_from_checkpoint_path(tmp_path)
    (folder / "load_data.json").write_text(json.dumps({"trial_cls_spec": "nowhere:Nothing"}))
    with pytest.raises(ValueError, match="pass trial_class="):
        pytorch.load_trial_from_checkpoint_path(folder)


@pytest.mark.parametrize("name", ["determined/state_dict.pth", "pedl/state_dict.pth", "checkpoint.pt"])
def test_older_layouts(name: str) -> None:
    with built() as trial:
        torch.nn.init.constant_(trial.model.weight, 7.0)
        with trial.context._core.checkpoint.store_path({"steps_completed": 3}) as (path, storage_id):
            (path / name).parent.mkdir(exist_ok=True)
            state = {
                "model_state_dict": trial.model.state_dict(), "optimizer_state_dict": trial.optimizer.state_dict(),
            }  # fmt: skip
            torch.save(state, path / name)
            told = {"steps_completed": 3, "last_ckpt": 3, "last_val": 0, "step_id": 0}
            (path / "workload_sequencer.pkl").write_bytes(pickle.dumps(told))
        run_id = trial.context._core.run_id
    after = fit(Tiny, 4, init={"resume": run_id}, latest_checkpoint=storage_id)
    assert after.trial.events[0] == "b3"
    loaded = pytorch.load_trial_from_checkpoint_path(after.folder(3), trial_class=Tiny)
    assert loaded.weights == trial.weights != after.trial.weights


class Stateful(pytorch.PyTorchCallback):
    """Its state is an object of its own, which only a pickle that runs code makes again."""

    size = 0

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": Numbers(5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.size = state_dict["numbers"].size


def test_objects_of_the_users_need_a_permission(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            self.callback = Stateful()
            return {"mine": self.callback}

    fit(Trial, 2, init={"name": "r"})
    assert (
        "leaving the state of callback 'mine' out of checkpoints, as it could not be read back (support.trials.Num"
        in caplog.text
    )
    assert fit(Trial, 3, init={"name": "r", "resume": "latest"}).trial.callback.size == 0
    monkeypatch.setenv("DET_CORE_ALLOW_PICKLE", "1")
    fit(Trial, 4, init={"name": "r", "resume": "latest"})
    assert fit(Trial, 5, init={"name": "r", "resume": "latest"}).trial.callback.size == 5
    monkeypatch.delenv("DET_CORE_ALLOW_PICKLE")
    with pytest.raises(CheckpointError, match=r"support\.trials\.Numbers.*DET_CORE_ALLOW_PICKLE=1.*torch_load_kwargs"):
        fit(Trial, 6, init={"name": "r", "resume": "latest"})


def refusing(scandir: Any, folder: Path) -> Any:
    """Return a ``scandir`` without permission for one directory; root has all permissions."""

    def scan(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    return scan


def code_of(found: Any) -> list[str]:
    """Return the code files of the last checkpoint."""
    code = found.folder() / "code"
    return sorted(p.relative_to(code).as_posix() for p in code.rglob("*") if p.is_file())


def test_a_checkpoint_keeps_the_modules_that_are_loaded_and_what_the_class_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not all that lies beside them: a folder of scripts may hold thousands."""
    files = {
        "mine_def.py": "import mine_pkg.part", "mine_pkg/__init__.py": "", "mine_pkg/part.py": "x = 1", "other.py": "",
        "mine_later.py": "", "site-packages/mine_installed.py": "", "mine_secret.py": "", "labels.txt": "a",
        "configs/a.yaml": "a", "configs/b.json": "b", "words/en/a.txt": "a", "words/run.log": "", "data/big.bin": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".detignore").write_text("# not needed\n*.log\nmine_secret.py\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    for name in ("mine_def", "mine_installed", "mine_secret"):
        importlib.import_module(name)

    class Trial(Tiny):
        code_files = ("labels.txt", "configs/*.yaml", "words", "nothing.txt")

        def metrics(self, loss: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                (tmp_path / "mine_def.py").write_text("changed")
                importlib.import_module("mine_later")
                (tmp_path / "mine_pkg" / "part.py").unlink(missing_ok=True)
            return {"loss": loss}

    found = fit(Trial, 2, checkpoint_period=pytorch.Batch(1))
    assert code_of(found) == [
        "configs/a.yaml", "labels.txt", "mine_def.py", "mine_later.py", "mine_pkg/__init__.py", "mine_pkg/part.py",
        "words/en/a.txt",
    ]  # fmt: skip
    assert not (found.folder(1) / "code" / "mine_later.py").exists(), "it was loaded later"
    assert (found.folder() / "code" / "mine_def.py").read_text() == "import mine_pkg.part", "as it was at first"

    monkeypatch.setattr(_checkpoint, "CODE_LIMIT", 5)
    found = fit(Trial, 2, checkpoint_period=pytorch.Batch(1))
    assert found.checkpoints == [1, 2] and not (found.folder(1) / "code").exists()
    assert caplog.text.count("out of checkpoints: it exceeds") == 1
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


def test_in_a_trial_of_an_experiment_it_keeps_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the rules of ``.gitignore``, as the client has them that ships it."""
    names = ("model_def.py", "pkg/part.py", "data/big.bin", "run.log", ".git/config", "__pycache__/x.pyc", ".env",
             "a.bin", "keep.bin", "m.py", "sub/m.py")  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".detignore").write_text("# not needed\ndata/\n*.log\n*.bin\n!keep.bin\n/m.py\n")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "socket")
    kept = _checkpoint.CodeSnapshot(tmp_path, (), whole=True).files()
    assert sorted(kept) == ["keep.bin", "model_def.py", "pkg/part.py", "sub/m.py"]
    with tarfile.open(fileobj=io.BytesIO(b64decode(pack(tmp_path)))) as tar:
        shipped = [member.name for member in tar if member.isreg()]
    assert set(kept) == set(shipped) - {".env"}
    monkeypatch.setattr(os, "scandir", refusing(os.scandir, tmp_path / "pkg"))
    assert "pkg/part.py" not in _checkpoint.CodeSnapshot(tmp_path, (), whole=True).files()
    assert f"leaving {tmp_path / 'pkg'} out of checkpoints: Permission denied" in caplog.text


def test_case_58_the_class_comes_from_the_checkpoints_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two checkpoints with a module of one name, each has its own."""
    found = fit(Tiny, 1)
    for value in (1, 20):  # of other sizes: bytecode is cached by time and size of a file
        folder = tmp_path / str(value)
        found.folder().rename(folder) if value == 1 else shutil.copytree(tmp_path / "1", folder)
        (folder / "code").mkdir(exist_ok=True)
        (folder / "code" / "only_there.py").write_text(
            f"from support.trials import Tiny\nclass Mine(Tiny):\n    value = {value}\n"
            "    def build(self):\n        import used_later\n        return super().build()\n"
        )
        (folder / "code" / "used_later.py").write_text("")
        (folder / "load_data.json").write_text(json.dumps({"trial_cls_spec": "only_there:Mine"}))
        monkeypatch.chdir(tmp_path)
        trial = pytorch.load_trial_from_checkpoint_path(str(value))
        assert (type(trial).__name__, trial.value, trial.weights) == ("Mine", value, found.trial.weights)  # type: ignore[attr-defined]


def test_invalid_hyperparameters_found_while_saving_are_not_saved_again() -> None:
    calls = []

    class Refusing(pytorch.PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            calls.append(len(calls))
            raise InvalidHP("too large to save")

    class Trial(Tiny):
        def build_callbacks(self) -> Any:
            return {"refusing": Refusing()}

    with pytest.raises(SystemExit) as e:
        fit(Trial, 2)
    assert e.value.code == 0 and calls == [0]


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    """Somebody has put it there, under a name that is looked for; what python leaves beside modules does not count."""
    init = {"name": "added", "resume": "latest"}
    folder = fit(Tiny, 2, init=init).folder()
    (folder / "code" / "__pycache__").mkdir(parents=True, exist_ok=True)
    (folder / "code" / "__pycache__" / "model_def.cpython-311.pyc").touch()
    fit(Tiny, 2, init=init)
    (folder / "gradients_rank0.pth").touch()
    with pytest.raises(CheckpointCorrupt, match=r"holds gradients_rank0.pth, which its manifest does not list"):
        fit(Tiny, 4, init=init)
    (folder / "gradients_rank0.pth").unlink()
    fit(Tiny, 4, init=init)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_bare_start_damaged_or_gone_is_replaced_by_the_one_before(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit(WithHooks, 3, checkpoint_period=pytorch.Batch(1))
    newest = first.folder(3)
    if what == "gone":
        shutil.rmtree(newest)
    else:
        (newest / "state_dict.pth").chmod(0o644)
        (newest / "state_dict.pth").write_bytes((newest / "state_dict.pth").read_bytes()[:-1] + b"?")
    after = fit(WithHooks, 4, init={"resume": first.run.run_id})
    assert [e for e in after.trial.events if isinstance(e, str) and e[0] == "b"] == ["b2", "b3"]
    assert after.trial.context.get_initial_batch() == 2
    assert "newer ones are passed over: " in capsys.readouterr().err
