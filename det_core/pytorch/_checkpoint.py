"""What a trial's checkpoint holds, in which file: writing it, reading it, applying it.

The layout is that of the contract's §10, so that what reads the original's checkpoints reads these: ``state_dict.pth``
(models without ``module.``, optimizers, schedulers, scaler, callbacks, the chief's random states), ``trial_state.json``
(counters and position; ``trial_state.pkl`` beside it for the original), ``rng_rank<r>.pth`` (random states of each
rank), ``loader_rank<r>.pth`` (its position in a DataLoader of the user's), ``gradients_rank<r>.pth`` (only between two
updates with ``aggregation_frequency``), ``load_data.json`` and ``code/``. Nothing that we have written is unpickled
beyond what ``weights_only`` admits.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import det_core
from det_core import core
from det_core._env import Environment
from det_core._json import to_builtin
from det_core._training.data_order import Position
from det_core._training.states import completed, readable_states, without_unreadable
from det_core._training.strategy import fitting
from det_core._walk import loaded, walk
from det_core.errors import CheckpointError, MissingExtra, StorageError
from det_core.pytorch._callback import Hooks
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._loop import Counters
from det_core.pytorch._original import (
    COUNTERS,
    as_current,
    find_state,
    load_weights,
    original_random_state,
    read_counters,
)
from det_core.pytorch._trial import Trial
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")
STATE = "state_dict.pth"
VERSION = 1
CODE_LIMIT = 32 << 20
"""Bytes of code that go into a checkpoint; if there are more, none does."""
CODE_FILES = 5000


@dataclass
class Content:
    """A checkpoint's content, apart from its files."""

    counters: Counters
    position: Position | None = None
    """None: it was written by the original, or by somebody else."""
    state: dict[str, Any] = field(default_factory=dict)
    """What ``state_dict.pth`` holds."""
    random: dict[str, Any] | None = None
    """The random states for this rank."""
    loader: dict[str, Any] | None = None
    """This rank's position in a torch DataLoader of the user's; None: there is none, or of another number of ranks."""
    gradients: list[torch.Tensor | None] | None = None
    """This rank's aggregated gradients; None: it was saved right after an update."""
    step: int = 0
    """What the checkpoint is listed with."""
    folder: Path | None = None
    """Where it was read from."""


def read(folder: Path, distributed: core.DistributedContext) -> Content:
    """What the checkpoint in ``folder`` holds for this rank; nothing is applied.

    Raises:
        CheckpointError: there is no file of a known layout, or it holds something else.
    """
    state = as_current(load_weights(find_state(folder)))
    counters, position = read_progress(folder)
    own: dict[str, Any] = {}
    if position is not None and position.size == distributed.size:
        files = {name: folder / f"{name}_rank{distributed.rank}.pth" for name in ("rng", "loader")}
        own = {name: load_weights(file) for name, file in files.items() if file.exists()}
    random = own.get("rng") or random_state_of(state)
    return Content(counters, position, state, random, own.get("loader"), _gradients(folder, distributed), folder=folder)


def _gradients(folder: Path, distributed: core.DistributedContext) -> list[torch.Tensor | None] | None:
    """This rank's aggregated gradients; of another number of ranks the mean, which their exchange leaves as it is."""
    files = sorted(folder.glob("gradients_rank*.pth"))
    own = folder / f"gradients_rank{distributed.rank}.pth"
    if len(files) == distributed.size and own.exists():
        mine: list[torch.Tensor | None] = load_weights(own)
        return mine
    each = zip(*map(load_weights, files), strict=True)
    return [None if g[0] is None else torch.stack(g).mean(0) for g in each] if files else None


def read_progress(folder: Path) -> tuple[Counters, Position | None]:
    """How far the trial was, and where in its data; None: the original wrote it, or somebody else."""
    saved = read_counters(folder)
    names = [name for name in asdict(Counters()) if saved.get(name) is not None]
    position = saved.get("position")
    return Counters(**{name: int(saved[name]) for name in names}), position and Position.from_dict(position)


def random_state_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The random states in a state of ours or of the original's, as ``core.set_random_state()`` takes them."""
    random: dict[str, Any] | None = state.get("rng_state")
    return random if random is None or "python" in random else original_random_state(random)


def apply(content: Content, context: PyTorchTrialContext, hooks: Hooks) -> None:
    """Put models, optimizers, schedulers, the scaler and callbacks to where they were."""
    state = content.state
    models, optimizers = context.models, context.optimizers
    for name, have in (("models", models), ("optimizers", optimizers), ("lr_schedulers", context.lr_schedulers)):
        saved = state.get(f"{name}_state_dict", [])
        if len(saved) != len(have):
            raise CheckpointError(f"the checkpoint holds {len(saved)} {name}, and the trial has wrapped {len(have)}")
    with fitting(f"the checkpoint in {content.folder}"):
        context._strategy.load(models, optimizers, state)
    for scheduler, saved in zip(context.lr_schedulers, state.get("lr_schedulers_state_dict", []), strict=True):
        scheduler.load_state_dict(saved)
    if context._scaler is not None and "scaler_state_dict" in state:
        context._scaler.load_state_dict(state["scaler_state_dict"])
    elif (context._scaler is not None) != ("scaler_state_dict" in state):
        where = "the checkpoint has none" if context._scaler is not None else "the trial has wrapped none"
        logger.warning("the state of the gradient scaler is not restored: %s", where)
    if content.gradients is not None:
        context._go_on_with(content.gradients)
    apply_callbacks(hooks, state)


def apply_callbacks(hooks: Hooks, state: Mapping[str, Any]) -> None:
    """Put callbacks to where they were."""
    known = state.get("callbacks") or {}
    for name, callback in hooks.named.items():
        if name in known:
            callback.load_state_dict(known[name])
        elif hooks.is_stateful(name):
            logger.warning("callback %r has a load_state_dict(), but the checkpoint holds no state of it", name)


class Files:
    """What a checkpoint of any trial holds beside its models; of one fit. ``kind`` is what the original calls it."""

    def __init__(self, trial: Trial, context: TrialContext, hooks: Hooks, kind: str) -> None:
        self._trial, self._context, self._hooks, self._kind = trial, context, hooks, kind
        self._code = Code(Path.cwd(), trial.code_files, whole=context._core.managed)
        self._warned: set[str] = set()

    def metadata(self, content: Content) -> dict[str, Any]:
        """What the checkpoint is listed with."""
        return {
            "steps_completed": content.step, "determined_version": det_core.__version__,
            "framework": f"torch-{torch.__version__}", "format": "pickle",
        }  # fmt: skip

    def files(self, content: Content) -> dict[str, bytes | Path]:
        """How far the trial is, how its class is found, and its code."""
        counters = asdict(content.counters)
        position = None if content.position is None else content.position.to_dict()
        original = {name: counters[name] for name in COUNTERS}
        return {
            "trial_state.json": json.dumps({**counters, "position": position, "version": VERSION}).encode(),
            "trial_state.pkl": pickle.dumps(original, protocol=2),
            "load_data.json": json.dumps(self._load_data(), default=_plain).encode(),
            **{f"code/{name}": content for name, content in self._code.files().items()},
        }

    def callbacks(self) -> dict[str, Any]:
        """Return the state of each callback, without those that could not be read back."""
        states = {name: callback.state_dict() for name, callback in self._hooks.named.items()}
        return readable_states("callback", states, load_weights, logger, self._warned)

    def readable(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that a checkpoint is to hold, without what could not be read back, with a warning of that."""
        return without_unreadable(state, load_weights, logger, self._warned)

    def _load_data(self) -> dict[str, Any]:
        """How :func:`load_trial_from_checkpoint_path` finds the class, and what it gives to it."""
        context, cls = self._context, type(self._trial)
        return {
            "trial_type": self._kind,
            "experiment_config": context._exp_conf,
            "hparams": context._hparams,
            "trial_cls_spec": f"{cls.__module__}:{cls.__qualname__}",
            "is_trainer": True,
        }


def write_files(files: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write files, or copy them, into a folder; raise StorageError where the disk refuses."""
    for name, given in files.items():
        with _storage_errors(folder / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(given.read_bytes() if isinstance(given, Path) else given)


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write a state by ``torch.save``; raise StorageError where the disk refuses."""
    with _storage_errors(path), open(path, "xb") as file:
        torch.save(state, file)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as e:
        cause = e if isinstance(e, OSError) else e.__context__  # torch.save raises a RuntimeError over the file's error
        if not isinstance(cause, OSError):
            raise
        where = cause.filename or path
        text = f"cannot write a file of the checkpoint: {where}: {cause.strerror or cause}"
        raise StorageError(cause.errno, text) from cause


class Checkpoints:
    """Writes the checkpoints of a PyTorchTrial, of one fit."""

    def __init__(self, trial: Trial, context: PyTorchTrialContext, hooks: Hooks) -> None:
        self._context, self._hooks, self._core = context, hooks, context._core
        self._files = Files(trial, context, hooks, "PyTorchTrial")

    def save(self, content: Content, *, alone: bool = False) -> str:
        """Save on the chief; the storage_id, on every rank.

        Args:
            content: counters and position.
            alone: without a word to the other ranks, because of an error that is under way here.
        """
        distributed = self._context.distributed
        own = {"rng": _saved(core.random_state())}
        if content.loader is not None:
            own["loader"] = _saved(content.loader)
        if content.counters.batches_trained % self._context._aggregation:
            own["gradients"] = _saved(self._context._aggregated())
        everyone = [own] if alone else distributed.gather(own)
        storage_id = None
        if everyone is not None:
            files: dict[str, bytes | Path] = {
                f"{name}_rank{rank}.pth": saved for rank, each in enumerate(everyone) for name, saved in each.items()
            }
            storage_id = self._save(
                content, files, blocking=alone or "on_checkpoint_upload_end" in self._hooks.anywhere
            )
        return str(storage_id if alone else distributed.broadcast(storage_id))

    def _save(self, content: Content, files: dict[str, bytes | Path], *, blocking: bool) -> str:
        hooks, checkpoint = self._hooks, self._core.checkpoint
        self._core.train.set_status("checkpointing")
        random = core.random_state()  # first: a callback's state_dict() may draw numbers
        state = {**self._state(), "callbacks": self._files.callbacks(), "rng_state": random}
        hooks.call("on_checkpoint_save_start", state)
        state = self._files.readable(state)
        metadata, files = self._files.metadata(content), files | self._files.files(content)
        if not (hooks.on_checkpoint_write_end or hooks.on_checkpoint_end):
            return checkpoint.save(state, metadata, name=STATE, files=files, blocking=blocking)
        with checkpoint.store_path(metadata, blocking=blocking) as (path, storage_id):
            write_state(state, path / STATE)
            write_files(files, path)
            hooks.call("on_checkpoint_end", str(path))
            hooks.call("on_checkpoint_write_end", str(path))
        return storage_id

    def read(self, folder: Path) -> Content:
        """Return what :func:`read` does; parts of a state that could not be saved are as they are now."""
        content = read(folder, self._context.distributed)
        content.state = completed(content.state, self._state)
        return content

    def _state(self) -> dict[str, Any]:
        context = self._context
        state = context._strategy.state(context.models, context.optimizers)
        state["lr_schedulers_state_dict"] = [scheduler.state_dict() for scheduler in context.lr_schedulers]
        if context._scaler is not None:
            state["scaler_state_dict"] = context._scaler.state_dict()
        return state


class Code:
    """The code that checkpoints keep, from which a trial's class is imported again.

    Under a master that is the working directory, which is the experiment's context. Elsewhere it may hold anything: it
    is the modules that this process has loaded from there, and what the class names.

    Args:
        folder: the working directory. What its ``.detignore`` names is left out.
        more: files, folders and patterns below it.
        whole: take all of it, but for hidden files.
    """

    def __init__(self, folder: Path, more: Iterable[str], *, whole: bool) -> None:
        self._folder, self._more, self._whole = folder, list(more), whole
        self._found: dict[str, bytes | Path] = {}
        self._modules = self._size = 0
        self._refused = ""

    def files(self) -> dict[str, bytes | Path]:
        """By path, as they were when they were first seen, since files come, go and grow; none if they are more than a
        model's code. They are looked for again when modules were loaded since; what cannot be read is left out."""
        modules = len(sys.modules)
        if not self._refused and modules != self._modules and not (self._whole and self._modules):
            self._modules = modules
            try:
                self._read(self._context() if self._whole else loaded(self._folder, self._more))
            except MissingExtra as e:
                self._refused = str(e)
            if self._refused:
                logger.warning("the code in %s is not kept in checkpoints: %s", self._folder, self._refused)
        return {} if self._refused else self._found

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._found:
                continue
            try:
                content = (self._folder / name).read_bytes()
            except OSError as e:
                self._tell(e)
                continue
            self._found[name], self._size = content, self._size + len(content)
            if self._size > CODE_LIMIT or len(self._found) > CODE_FILES:
                self._refused = (
                    f"it is more than {CODE_LIMIT >> 20} MB or {CODE_FILES} files. Name in .detignore there what a "
                    "model does not need, one pattern a line, as in .gitignore"
                )
                return

    def _context(self) -> Iterator[str]:
        home = Environment.read().home
        return (path for path, entry in walk(self._folder, home, hidden=False, failed=self._tell) if entry.is_file())

    def _tell(self, error: OSError) -> None:
        logger.warning("%s is not kept in checkpoints: %s", error.filename, error.strerror)


def tell_changes(content: Content, hparams: Mapping[str, Any] | None) -> None:
    """Warn of hyperparameters that are not those of a checkpoint."""
    if content.folder is None or hparams is None or not (told := content.folder / "load_data.json").is_file():
        return
    before = json.loads(told.read_text()).get("hparams") or {}
    now = json.loads(json.dumps(dict(hparams), default=_plain))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        logger.warning(
            "hyperparameters differ from the checkpoint's: %s. What it restores keeps its own values, such as an "
            "optimizer's learning rate", "; ".join(f"{n} is {now.get(n)}, and was {before.get(n)}" for n in names),
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a value that is not JSON as one that is: arrays as lists and numbers, any other as its text."""
    builtin = to_builtin(value)
    return str(value) if builtin is value else builtin


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
