"""Checkpoints of trials: their files, written, read and applied.

Tools for Determined's checkpoints can read this layout (contract §10): ``state_dict.pth`` (models without ``module.``,
optimizers, schedulers, scaler, callbacks, random states of the chief), ``trial_state.json`` (counters and position;
``trial_state.pkl`` for Determined), ``rng_rank<r>.pth`` (random states of each rank), ``loader_rank<r>.pth`` (its
position in a DataLoader of the user), ``gradients_rank<r>.pth`` (only between two updates with
``aggregation_frequency``), ``load_data.json`` and ``code/``.
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
"""Maximum bytes of code in a checkpoint; larger code is left out as a whole."""
CODE_FILES = 5000


@dataclass
class CheckpointContent:
    """CheckpointContent of a checkpoint, independent of its files."""

    counters: Counters
    position: Position | None = None
    """None if another program wrote the checkpoint, such as Determined."""
    state: dict[str, Any] = field(default_factory=dict)
    """CheckpointContent of ``state_dict.pth``."""
    random: dict[str, Any] | None = None
    """Random states of this rank."""
    loader: dict[str, Any] | None = None
    """Position of this rank in a torch DataLoader of the user; None without one, or with another number of ranks."""
    gradients: list[torch.Tensor | None] | None = None
    """Aggregated gradients of this rank; None right after an update."""
    step: int = 0
    """``steps_completed`` of the checkpoint."""
    folder: Path | None = None
    """Directory it was read from."""


def read(folder: Path, distributed: core.DistributedContext) -> CheckpointContent:
    """Read the content for this rank, without applying it.

    Raises:
        CheckpointError: If no file has a known layout, or its content is not a trial's.
    """
    state = as_current(load_weights(find_state(folder)))
    counters, position = read_progress(folder)
    own: dict[str, Any] = {}
    # Random states and positions of ranks have no meaning for another number of ranks.
    if position is not None and position.size == distributed.size:
        files = {name: folder / f"{name}_rank{distributed.rank}.pth" for name in ("rng", "loader")}
        own = {name: load_weights(file) for name, file in files.items() if file.exists()}
    random = own.get("rng") or random_state_of(state)
    gradients = _read_gradients(folder, distributed)
    return CheckpointContent(counters, position, state, random, own.get("loader"), gradients, folder=folder)


def _read_gradients(folder: Path, distributed: core.DistributedContext) -> list[torch.Tensor | None] | None:
    """Return the aggregated gradients of this rank, or their mean if another number of ranks saved them."""
    files = sorted(folder.glob("gradients_rank*.pth"))
    own = folder / f"gradients_rank{distributed.rank}.pth"
    if len(files) == distributed.size and own.exists():
        mine: list[torch.Tensor | None] = load_weights(own)
        return mine
    if not files:
        return None
    # The exchange before the update averages over ranks, which leaves a mean unchanged.
    means: list[torch.Tensor | None] = []
    for gradients in zip(*map(load_weights, files), strict=True):
        means.append(None)
        if gradients[0] is not None:
            means[-1] = torch.stack(gradients).mean(0)
    return means


def read_progress(folder: Path) -> tuple[Counters, Position | None]:
    """Return the counters, and the position in the data if det_core wrote the checkpoint."""
    saved = read_counters(folder)
    names = [name for name in asdict(Counters()) if saved.get(name) is not None]
    position = saved.get("position")
    return Counters(**{name: int(saved[name]) for name in names}), position and Position.from_dict(position)


def random_state_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the random states of ``state_dict.pth`` in the form of ``core.set_random_state()``."""
    random: dict[str, Any] | None = state.get("rng_state")
    if random is None or "python" in random:
        return random
    return original_random_state(random)


def apply(content: CheckpointContent, context: PyTorchTrialContext, hooks: Hooks) -> None:
    """Restore models, optimizers, schedulers, the scaler and callbacks."""
    state = content.state
    models = context.models
    optimizers = context.optimizers
    for name, have in (("models", models), ("optimizers", optimizers), ("lr_schedulers", context.lr_schedulers)):
        saved = state.get(f"{name}_state_dict", [])
        if len(saved) != len(have):
            raise CheckpointError(f"the checkpoint has {len(saved)} {name}, but the trial has wrapped {len(have)}")
    with fitting(f"the checkpoint in {content.folder}"):
        context._strategy.load(models, optimizers, state)
    for scheduler, saved in zip(context.lr_schedulers, state.get("lr_schedulers_state_dict", []), strict=True):
        scheduler.load_state_dict(saved)
    if context._scaler is not None and "scaler_state_dict" in state:
        context._scaler.load_state_dict(state["scaler_state_dict"])
    elif (context._scaler is not None) != ("scaler_state_dict" in state):
        missing_in = "checkpoint"
        if context._scaler is None:
            missing_in = "trial"
        logger.warning("state of the gradient scaler not restored: the %s has no scaler", missing_in)
    if content.gradients is not None:
        context._restore_gradients(content.gradients)
    apply_callbacks(hooks, state)


def apply_callbacks(hooks: Hooks, state: Mapping[str, Any]) -> None:
    """Restore the states of callbacks."""
    known = state.get("callbacks") or {}
    for name, callback in hooks.named.items():
        if name in known:
            callback.load_state_dict(known[name])
        elif hooks.is_stateful(name):
            logger.warning("callback %r has a load_state_dict(), but the checkpoint has no state for it", name)


class CheckpointFiles:
    """Files and metadata that checkpoints of all trial classes share, for one fit.

    Args:
        kind: ``trial_type`` in ``load_data.json``, as Determined writes it.
    """

    def __init__(self, trial: Trial, context: TrialContext, hooks: Hooks, kind: str) -> None:
        self._trial = trial
        self._context = context
        self._hooks = hooks
        self._kind = kind
        self._code = CodeSnapshot(Path.cwd(), trial.code_files, whole=context._core.managed)
        self._warned: set[str] = set()

    def metadata(self, content: CheckpointContent) -> dict[str, Any]:
        """Return the metadata of the checkpoint."""
        return {
            "steps_completed": content.step, "determined_version": det_core.__version__,
            "framework": f"torch-{torch.__version__}", "format": "pickle",
        }  # fmt: skip

    def files(self, content: CheckpointContent) -> dict[str, bytes | Path]:
        """Return counters, position, the location of the class, and code."""
        counters = asdict(content.counters)
        position = content.position and content.position.to_dict()
        original = {name: counters[name] for name in COUNTERS}
        return {
            "trial_state.json": json.dumps({**counters, "position": position, "version": VERSION}).encode(),
            "trial_state.pkl": pickle.dumps(original, protocol=2),  # the only form that Determined reads
            "load_data.json": json.dumps(self._load_data(), default=_plain).encode(),
            **{f"code/{name}": content for name, content in self._code.files().items()},
        }

    def callbacks(self) -> dict[str, Any]:
        """Return the state of each callback, without states that could not be read back."""
        states = {name: callback.state_dict() for name, callback in self._hooks.named.items()}
        return readable_states("callback", states, load_weights, logger, self._warned)

    def readable(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state`` without parts that could not be read back, with a warning for each."""
        return without_unreadable(state, load_weights, logger, self._warned)

    def _load_data(self) -> dict[str, Any]:
        """Return the class and its arguments for :func:`load_trial_from_checkpoint_path`."""
        context = self._context
        cls = type(self._trial)
        return {
            "trial_type": self._kind,
            "experiment_config": context._exp_conf,
            "hparams": context._hparams,
            "trial_cls_spec": f"{cls.__module__}:{cls.__qualname__}",
            "is_trainer": True,
        }


def write_files(files: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write or copy files into a directory.

    Raises:
        StorageError: If a file cannot be written.
    """
    for name, source in files.items():
        with _storage_errors(folder / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, Path):
                source = source.read_bytes()
            (folder / name).write_bytes(source)


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write a state with ``torch.save``.

    Raises:
        StorageError: If the file cannot be written.
    """
    with _storage_errors(path), open(path, "xb") as file:  # a hook may not have put a file of this name there
        torch.save(state, file)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as e:
        cause: BaseException | None = e
        if isinstance(e, RuntimeError):
            cause = e.__context__  # torch.save raises a RuntimeError while it handles the file's error
        if not isinstance(cause, OSError):
            raise
        text = f"cannot write checkpoint file {cause.filename or path}: {cause.strerror or cause}"
        raise StorageError(cause.errno, text) from cause


class Checkpoints:
    """Reads and writes the checkpoints of a PyTorchTrial in one fit."""

    def __init__(self, trial: Trial, context: PyTorchTrialContext, hooks: Hooks) -> None:
        self._context = context
        self._hooks = hooks
        self._core = context._core
        self._files = CheckpointFiles(trial, context, hooks, "PyTorchTrial")

    def save(self, content: CheckpointContent, *, alone: bool = False) -> str:
        """Save on the chief, and return the storage_id on every rank.

        Args:
            content: counters and position.
            alone: call no collective, because this rank is about to leave with an error.
        """
        distributed = self._context.distributed
        own = {"rng": _saved(core.random_state())}
        if content.loader is not None:
            own["loader"] = _saved(content.loader)
        if content.counters.batches_trained % self._context._aggregation:
            own["gradients"] = _saved(self._context._aggregated())
        per_rank: list[dict[str, bytes]] | None = [own]
        if not alone:
            per_rank = distributed.gather(own)
        storage_id = ""
        if per_rank is not None:
            files: dict[str, bytes | Path] = {
                f"{name}_rank{rank}.pth": saved for rank, parts in enumerate(per_rank) for name, saved in parts.items()
            }
            # The upload hook gets the ID of a complete checkpoint.
            storage_id = self._save(
                content, files, blocking=alone or "on_checkpoint_upload_end" in self._hooks.anywhere
            )
        if alone:
            return storage_id
        return str(distributed.broadcast(storage_id))

    def _save(self, content: CheckpointContent, files: dict[str, bytes | Path], *, blocking: bool) -> str:
        hooks = self._hooks
        checkpoint = self._core.checkpoint
        self._core.train.set_status("checkpointing")
        random = core.random_state()  # first: the state_dict() of a callback may draw random numbers
        state = {**self._state(), "callbacks": self._files.callbacks(), "rng_state": random}
        hooks.call("on_checkpoint_save_start", state)
        state = self._files.readable(state)
        metadata = self._files.metadata(content)
        files = files | self._files.files(content)
        if not (hooks.on_checkpoint_write_end or hooks.on_checkpoint_end):  # hooks need a directory
            return checkpoint.save(state, metadata, name=STATE, files=files, blocking=blocking)
        with checkpoint.store_path(metadata, blocking=blocking) as (path, storage_id):
            write_state(state, path / STATE)
            write_files(files, path)
            hooks.call("on_checkpoint_end", str(path))
            hooks.call("on_checkpoint_write_end", str(path))
        return storage_id

    def read(self, folder: Path) -> CheckpointContent:
        """Read a checkpoint; parts of the state that were not saved keep their current values."""
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


class CodeSnapshot:
    """Code in checkpoints, from which the class of a trial can be imported again.

    Args:
        folder: working directory, without the files that its ``.detignore`` names.
        more: files, directories and patterns below it.
        whole: take all files except hidden ones, as in an experiment, whose working directory is its context. Otherwise
            only ``more`` and the modules that this process has loaded from the directory, which may contain anything.
    """

    def __init__(self, folder: Path, more: Iterable[str], *, whole: bool) -> None:
        self._folder = folder
        self._more = list(more)
        self._whole = whole
        self._found: dict[str, bytes | Path] = {}
        self._modules = self._size = 0
        self._refused = ""

    def files(self) -> dict[str, bytes | Path]:
        """Return the files by path, with the content they had when first seen; none if the code is too large.

        Modules loaded since the last call are added. Unreadable files are left out.
        """
        modules = len(sys.modules)
        if not self._refused and modules != self._modules and not (self._whole and self._modules):
            self._modules = modules
            try:
                if self._whole:
                    self._read(self._context())
                else:
                    self._read(loaded(self._folder, self._more))
            except MissingExtra as e:
                self._refused = str(e)
            if self._refused:
                logger.warning("leaving code in %s out of checkpoints: %s", self._folder, self._refused)
        if self._refused:
            return {}
        return self._found

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._found:
                continue
            try:
                content = (self._folder / name).read_bytes()
            except OSError as e:
                self._warn(e)
                continue
            self._found[name] = content
            self._size += len(content)
            if self._size > CODE_LIMIT or len(self._found) > CODE_FILES:
                self._refused = (
                    f"it exceeds {CODE_LIMIT >> 20} MB or {CODE_FILES} files; list files that the model does not need "
                    "in .detignore there, with patterns as in .gitignore"
                )
                return

    def _context(self) -> Iterator[str]:
        home = Environment.read().home
        return (path for path, entry in walk(self._folder, home, hidden=False, failed=self._warn) if entry.is_file())

    def _warn(self, error: OSError) -> None:
        logger.warning("leaving %s out of checkpoints: %s", error.filename, error.strerror)


def warn_hparam_changes(content: CheckpointContent, hparams: Mapping[str, Any] | None) -> None:
    """Warn of hyperparameters that differ from those of a checkpoint."""
    if content.folder is None or hparams is None or not (load_data := content.folder / "load_data.json").is_file():
        return
    # Both through JSON, so that a tuple equals the list it was saved as.
    before = json.loads(load_data.read_text()).get("hparams") or {}
    now = json.loads(json.dumps(dict(hparams), default=_plain))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        logger.warning(
            "hyperparameters differ from the checkpoint's: %s. Restored objects keep their own values, such as the "
            "learning rate of an optimizer", "; ".join(f"{n} was {before.get(n)} and is {now.get(n)}" for n in names),
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not know: arrays to lists and numbers, others to their text."""
    builtin = to_builtin(value)
    if builtin is value:
        return str(value)
    return builtin


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
