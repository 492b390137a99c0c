"""What a DeepSpeedTrial's checkpoint holds: what its engines write on each rank, and each rank's own states.

``det_state_dict_rank<r>.pth`` (callbacks and random states of rank r), what ``DeepSpeedTrial.save`` makes (``model0/``,
…, ``latest``), and from the chief ``trial_state.json``, ``trial_state.pkl``, ``load_data.json`` and ``code/``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from det_core import core
from det_core._env import Environment
from det_core.errors import CheckpointError
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import Content, Files, apply_callbacks, random_state_of, read_progress, write_files
from det_core.pytorch._original import load_weights
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial
from det_core.pytorch.deepspeed._universal import for_other_ranks

OWN = "det_state_dict_rank{}.pth"
ALLOW = "if you trust whoever did, set DET_CORE_ALLOW_PICKLE=1, or give deepspeed.init(allow_pickle=True)"


class Shards:
    """Writes and reads the checkpoints of one fit; every rank calls every method.

    Args:
        trial: the user's.
        context: its context.
        hooks: its callbacks.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, hooks: Hooks) -> None:
        self._trial, self._context, self._hooks, self._core = trial, context, hooks, context._core
        self._rank, self._size = context.distributed.rank, context.distributed.size
        self._files = Files(trial, context, hooks, "DeepSpeedTrial")

    def save(self, content: Content) -> str:
        """Save; the storage_id, on every rank."""
        hooks = self._hooks
        if self._rank == 0:
            self._core.train.set_status("checkpointing")
        state = {"callbacks": self._files.callbacks(), "rng_state": core.random_state()}
        hooks.call("on_checkpoint_save_start", state)
        self._files.check(state["callbacks"])
        blocking = "on_checkpoint_upload_end" in hooks.anywhere
        metadata = self._files.metadata(content)
        with self._core.checkpoint.store_path(metadata, shard=True, blocking=blocking) as (path, storage_id):
            torch.save(state, path / OWN.format(self._rank))
            self._trial.save(self._context, path)
            if self._rank == 0:
                write_files(self._files.files(content), path)
            hooks.call("on_checkpoint_end", str(path))
            hooks.call("on_checkpoint_write_end", str(path))
        return storage_id

    def read(self, folder: Path, storage_id: str) -> Content:
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
        counters, position = read_progress(folder)
        return Content(counters, position, state, random_state_of(state), folder=folder)

    def apply(self, content: Content) -> None:
        """Put the engines and the callbacks to where they were."""
        folder = content.folder
        assert folder is not None
        self._hooks.call("on_checkpoint_load_start", content.state)
        groups = None if content.position is None else content.position.size
        if self._ranks_of(folder) == self._size and groups in (None, self._context._mpu.data_parallel_world_size):
            self._trial.load(self._context, folder)
        else:
            with for_other_ranks(folder, self._ranks_of(folder), self._context) as path:
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
