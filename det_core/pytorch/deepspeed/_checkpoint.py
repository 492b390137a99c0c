"""Checkpoints of DeepSpeedTrials: files of the engines and states of each rank.

A checkpoint has ``det_state_dict_rank<r>.pth`` (callbacks and random states of rank r), the files of
``DeepSpeedTrial.save`` (``model0/``, …, ``latest``), and from the chief ``trial_state.json``, ``trial_state.pkl``,
``load_data.json`` and ``code/``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from det_core import core
from det_core._env import Environment
from det_core._training.states import completed
from det_core.errors import CheckpointError
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import (
    CheckpointContent,
    CheckpointFiles,
    apply_callbacks,
    random_state_of,
    read_progress,
    write_files,
    write_state,
)
from det_core.pytorch._original import load_weights
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial

logger = logging.getLogger("det_core.pytorch")
OWN = "det_state_dict_rank{}.pth"
ALLOW = "if you trust its author, set DET_CORE_ALLOW_PICKLE=1, or pass deepspeed.init(allow_pickle=True)"


class Shards:
    """Reads and writes the checkpoints of one fit; every rank calls every method."""

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, hooks: Hooks) -> None:
        self._trial = trial
        self._context = context
        self._hooks = hooks
        self._core = context._core
        self._rank = context.distributed.rank
        self._size = context.distributed.size
        self._files = CheckpointFiles(trial, context, hooks, "DeepSpeedTrial")

    def save(self, content: CheckpointContent) -> str:
        """Save a checkpoint, and return its storage_id on every rank."""
        hooks = self._hooks
        if self._rank == 0:
            self._core.train.set_status("checkpointing")
        state = {"callbacks": self._files.callbacks(), "rng_state": core.random_state()}
        hooks.call("on_checkpoint_save_start", state)
        state = self._files.readable(state)
        blocking = "on_checkpoint_upload_end" in hooks.anywhere
        metadata = self._files.metadata(content)
        with self._core.checkpoint.store_path(metadata, shard=True, blocking=blocking) as (path, storage_id):
            write_state(state, path / OWN.format(self._rank))
            self._trial.save(self._context, path)
            if self._rank == 0:
                write_files(self._files.files(content), path)
            hooks.call("on_checkpoint_end", str(path))
            hooks.call("on_checkpoint_write_end", str(path))
        return storage_id

    def read(self, folder: Path, storage_id: str) -> CheckpointContent:
        """Read the content for this rank; a rank that did not save gets the chief's states.

        Raises:
            CheckpointError: If it has no file of a rank, or its origin is not trusted.
        """
        if not self._ranks_of(folder):
            found = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise CheckpointError(
                f"{folder} is not a DeepSpeedTrial's checkpoint: expected {OWN.format('<r>')}, found {found}"
            )
        self._check_origin(storage_id)
        own = folder / OWN.format(self._rank)
        if not own.is_file():
            own = folder / OWN.format(0)
        state = load_weights(own, allow_pickle=self._context._allow_pickle)
        state = completed(state, dict)
        counters, position = read_progress(folder)
        return CheckpointContent(counters, position, state, random_state_of(state), folder=folder)

    def apply(self, content: CheckpointContent) -> None:
        """Restore the engines and the callbacks."""
        folder = content.folder
        assert folder is not None
        self._hooks.call("on_checkpoint_load_start", content.state)
        groups = content.position and content.position.size
        if self._ranks_of(folder) == self._size and groups in (None, self._context._mpu.data_parallel_world_size):
            self._trial.load(self._context, folder)
        else:
            with _for_other_ranks(folder, self._ranks_of(folder), self._context) as path:
                self._trial.load(self._context, path)
        apply_callbacks(self._hooks, content.state)

    def _ranks_of(self, folder: Path) -> int:
        """Return the number of ranks that wrote a checkpoint."""
        return len(list(folder.glob(OWN.format("*"))))

    def _check_origin(self, storage_id: str) -> None:
        """Raise CheckpointError for a checkpoint of another run or experiment, unless pickles are allowed."""
        allowed = self._context._allow_pickle
        if allowed is None:
            allowed = Environment.read().allow_pickle
        if not allowed and not self._core.checkpoint.is_own(storage_id):
            raise CheckpointError(
                f"refusing to load checkpoint {storage_id}: DeepSpeed's files are pickles, which run code when loaded, "
                f"and neither this run nor its experiment wrote them; {ALLOW}"
            )


@contextmanager
def _for_other_ranks(folder: Path, ranks: int, context: DeepSpeedTrialContext) -> Iterator[Path]:
    """Yield a directory from which engines load the checkpoint of another number of ranks; a collective.

    If ZeRO has partitioned the optimizer, DeepSpeed's converter for Adam-like optimizers joins the parts, once on each
    machine. Without ZeRO, the files fit any number of data parallel ranks.

    Raises:
        CheckpointError: On every rank, if DeepSpeed cannot load it.
    """
    distributed = context.distributed
    size = context.distributed.size
    partitioned = sorted({path.parent for path in folder.glob("*/*_optim_states.pt")})
    problem = f"cannot load a checkpoint of {ranks} rank(s) on {size}: start {ranks}, or start from scratch"
    made: str | None = None
    failure: str | None = None
    if partitioned and distributed.local_rank == 0:
        made = tempfile.mkdtemp(prefix="det_core-universal-")
    try:
        if made is not None:
            failure = _convert(folder, partitioned, Path(made))
        if failures := list(filter(None, distributed.allgather(failure))):
            raise CheckpointError(
                f"{problem} (DeepSpeed's universal checkpoint, for Adam-like optimizers: {failures[0]})"
            )
        path = distributed.broadcast_local(made)
        loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if partitioned:
            loading = _loading_universal(context)
        with loading:
            try:
                yield Path(path or folder)
            except CheckpointError as e:  # other errors of a user-defined load() are left as they are
                raise CheckpointError(f"{problem} ({e})") from e
        distributed.allgather_local(None)  # wait until all have read the directory, which is deleted next
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _convert(folder: Path, partitioned: list[Path], into: Path) -> str | None:
    """Copy ``folder`` by links, with universal checkpoints for partitioned ones; return the error, or None."""
    from deepspeed.checkpoint import ds_to_universal

    for path in folder.iterdir():
        if path not in partitioned:
            os.symlink(path.absolute(), into / path.name)
    for path in partitioned:
        logger.info("converting %s for another number of ranks, into %s", path, into)
        (into / path.name).mkdir()
        options = Namespace(
            input_folder=str(path), output_folder=str(into / path.name), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=False, inject_missing_state=True,
        )  # fmt: skip
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                ds_to_universal.main(options)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return None


@contextmanager
def _loading_universal(context: DeepSpeedTrialContext) -> Iterator[None]:
    """Make engines load universal checkpoints, as with ``load_universal_checkpoint`` in their configuration."""
    before = [(engine._config, engine._config.load_universal_checkpoint) for engine in context.models]
    try:
        for config, _ in before:
            config.load_universal_checkpoint = True
        yield
    finally:
        for config, value in before:
            config.load_universal_checkpoint = value
