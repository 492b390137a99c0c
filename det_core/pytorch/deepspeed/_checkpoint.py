"""What a DeepSpeedTrial's checkpoint holds: what its engines write on each rank, and each rank's own states.

``det_state_dict_rank<r>.pth`` (callbacks and random states of rank r), what ``DeepSpeedTrial.save`` makes (``model0/``,
…, ``latest``), and from the chief ``trial_state.json``, ``trial_state.pkl``, ``load_data.json`` and ``code/``.
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
ALLOW = "if you trust whoever did, set DET_CORE_ALLOW_PICKLE=1, or give deepspeed.init(allow_pickle=True)"


class Shards:
    """Writes and reads the checkpoints of one fit; every rank calls every method."""

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, hooks: Hooks) -> None:
        self._trial = trial
        self._context = context
        self._hooks = hooks
        self._core = context._core
        self._rank = context.distributed.rank
        self._size = context.distributed.size
        self._files = CheckpointFiles(trial, context, hooks, "DeepSpeedTrial")

    def save(self, content: CheckpointContent) -> str:
        """Save; the storage_id, on every rank."""
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
        """What a checkpoint holds for this rank; one that did not write it has the chief's states.

        Raises:
            CheckpointError: there is no file of a rank, or what DeepSpeed would read is not to be trusted.
        """
        if not self._ranks_of(folder):
            there = ", ".join(sorted(each.name for each in folder.iterdir()))
            raise CheckpointError(
                f"{folder} is no DeepSpeedTrial's checkpoint: looked for {OWN.format('<r>')}; there is {there}"
            )
        self._check_origin(storage_id)
        own = folder / OWN.format(self._rank)
        state = load_weights(own if own.is_file() else folder / OWN.format(0), allow_pickle=self._context._allow_pickle)
        state = completed(state, dict)
        counters, position = read_progress(folder)
        return CheckpointContent(counters, position, state, random_state_of(state), folder=folder)

    def apply(self, content: CheckpointContent) -> None:
        """Put the engines and the callbacks to where they were."""
        folder = content.folder
        assert folder is not None
        self._hooks.call("on_checkpoint_load_start", content.state)
        groups = None if content.position is None else content.position.size
        if self._ranks_of(folder) == self._size and groups in (None, self._context._mpu.data_parallel_world_size):
            self._trial.load(self._context, folder)
        else:
            with _for_other_ranks(folder, self._ranks_of(folder), self._context) as path:
                self._trial.load(self._context, path)
        apply_callbacks(self._hooks, content.state)

    def _ranks_of(self, folder: Path) -> int:
        """How many ranks wrote a checkpoint."""
        return len(list(folder.glob(OWN.format("*"))))

    def _check_origin(self, storage_id: str) -> None:
        """DeepSpeed's files are pickles by their format, and it reads them as such, which may run code."""
        allowed = self._context._allow_pickle
        allowed = Environment.read().allow_pickle if allowed is None else allowed
        if not allowed and not self._core.checkpoint.is_own(storage_id):
            raise CheckpointError(
                f"checkpoint {storage_id} was not read: DeepSpeed's files are pickles, which run code when they are "
                f"read, and neither this run nor its experiment wrote them; {ALLOW}"
            )


@contextmanager
def _for_other_ranks(folder: Path, ranks: int, context: DeepSpeedTrialContext) -> Iterator[Path]:
    """A folder from which engines load what another number of ranks has saved; every rank enters.

    Where ZeRO has partitioned the optimizer, DeepSpeed's converter puts the parts together again, once on each machine;
    it knows the states of Adam and its kind. Without ZeRO the files are good for any number of data parallel ranks.

    Raises:
        CheckpointError: DeepSpeed can do neither, on every rank.
    """
    distributed = context.distributed
    size = context.distributed.size
    partitioned = sorted({path.parent for path in folder.glob("*/*_optim_states.pt")})
    why = f"a checkpoint of {ranks} rank(s) cannot be loaded on {size}: start as many as then, or from scratch"
    made = tempfile.mkdtemp(prefix="det_core-universal-") if partitioned and distributed.local_rank == 0 else None
    try:
        failed = _converted(folder, partitioned, Path(made)) if made is not None else None
        if failures := [each for each in distributed.allgather(failed) if each is not None]:
            raise CheckpointError(f"{why} (DeepSpeed's universal checkpoint, for Adam and its kind: {failures[0]})")
        path = distributed.broadcast_local(made)
        with _loading_universal(context) if partitioned else contextlib.nullcontext():
            try:
                yield folder if path is None else Path(path)
            except CheckpointError as e:  # what else a load() of the user's own raises is the user's
                raise CheckpointError(f"{why} ({e})") from e
        distributed.allgather_local(None)  # all have read it
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _converted(folder: Path, partitioned: list[Path], into: Path) -> str | None:
    """Make what is like ``folder``, with universal checkpoints in place of some of its folders; what went wrong."""
    from deepspeed.checkpoint import ds_to_universal

    for path in folder.iterdir():
        if path not in partitioned:
            os.symlink(path.absolute(), into / path.name)
    for path in partitioned:
        logger.info("converting %s for another number of ranks, into %s", path, into)
        (into / path.name).mkdir()
        asked = Namespace(
            input_folder=str(path), output_folder=str(into / path.name), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=False, inject_missing_state=True,
        )  # fmt: skip
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                ds_to_universal.main(asked)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return None


@contextmanager
def _loading_universal(context: DeepSpeedTrialContext) -> Iterator[None]:
    """Have engines read universal checkpoints, as they do where their configuration says so."""
    before = [(engine._config, engine._config.load_universal_checkpoint) for engine in context.models]
    try:
        for config, _ in before:
            config.load_universal_checkpoint = True
        yield
    finally:
        for config, asked in before:
            config.load_universal_checkpoint = asked
