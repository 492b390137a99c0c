"""Saves by the user: checkpoints in one file, and training states in directories with accelerate's layout.

A training state has ``model.safetensors``, ``optimizer.bin``, ``custom_checkpoint_<n>.pkl`` (schedulers),
``scaler.pt``, ``random_states_<rank>.pkl`` and ``trainer_metadata.pt``, as the original writes them, and
``trainer_state.pt`` with the rest of a checkpoint of the core.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from det_core._optional import require
from det_core._standalone.files import replacing
from det_core._training.states import completed
from det_core._training.strategy import fitting, load_model, load_optimizer
from det_core.accelerated import _state
from det_core.accelerated._base import Run, TrainerBase, as_list
from det_core.accelerated._strategy import NEEDED
from det_core.errors import CheckpointError

METADATA = "trainer_metadata.pt"
BESIDE = "trainer_state.pt"


class Saves(TrainerBase):
    """Methods to save and load, for users and callbacks."""

    def save_checkpoint(
        self, save_path: Any, checkpoint_kwargs: Mapping[str, Any] | None = None, save_optimizer: bool = True,
        save_scheduler: bool = True, save_per_node: bool = True,
    ) -> None:  # fmt: skip
        """Write model, optimizer and scheduler to one file for ``torch.load(weights_only=True)``.

        Args:
            save_path: path of the file.
            checkpoint_kwargs: further keys of the file.
            save_optimizer, save_scheduler: whether to include the state of the optimizer and the scheduler.
            save_per_node: whether to write it on each node, rather than on the first only.
        """
        strategy = self._det_core.strategy
        path = Path(save_path)
        strategy.wait_for_everyone()
        writes = strategy.is_main_process
        if save_per_node:
            writes = strategy.is_local_main_process
        if not writes:
            return
        content: dict[str, Any] = {"model_state_dict": strategy.bare(self.model).state_dict()}
        optimizers = as_list(self.optimizer)
        schedulers = as_list(self.scheduler)
        if save_optimizer and optimizers:
            content["optimizer_state_dict"] = _one_or_many([o.state_dict() for o in optimizers])
        if save_scheduler and schedulers:
            try:
                content["scheduler_state_dict"] = _one_or_many([s.state_dict() for s in schedulers])
            except Exception as e:
                self.print(f"The scheduler's state is not saved, as its state_dict() failed: {e}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as staging:  # an old file stays until the new one is complete
            torch.save(_state.readable(self, _state.to_python({**content, **(checkpoint_kwargs or {})})), staging)

    def load_checkpoint(
        self, checkpoint_path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a file of :meth:`save_checkpoint`, and return its content.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it holds an optimizer or a scheduler, and this Trainer has none.
            CheckpointError: If it is of another model, or holds code.
        """
        strategy = self._det_core.strategy
        strategy.wait_for_everyone()
        content: dict[str, Any] = _state.load(Path(checkpoint_path))
        wanted = []
        parts = {"optimizer": (load_optimizer, self.optimizer), "scheduler": (load_scheduler, self.scheduler)}
        for name, (wants, part) in parts.items():
            have = as_list(part)
            saved = content.get(f"{name}_state_dict")
            if saved is None or not wants:
                continue
            if not have:
                raise ValueError(
                    f"{checkpoint_path} holds the state of a {name}, and this Trainer has none: give load_{name}=False "
                    "to pass over it"
                )
            if not isinstance(saved, list):
                saved = [saved]
            wanted.append((have, saved))
        with fitting(checkpoint_path):
            model = strategy.bare(self.model)
            load_model(model, completed(content["model_state_dict"], model.state_dict))
        for have, saved in wanted:
            for owner, state in zip(have, saved, strict=True):
                owner.load_state_dict(completed(state, owner.state_dict))
        return completed(content, dict)

    def save_training_state(self, output_dir: Any, checkpoint_kwargs: Mapping[str, Any] | None = None) -> None:
        """Save a training state for ``train(resume_from=)`` to a directory, completely or not at all.

        Call it on every rank. Within a step, the state is saved after the update to which the step belongs.
        """
        self._det_core.after_update(lambda: _save(self, Path(output_dir), checkpoint_kwargs))

    def load_training_state(self, input_dir: Any) -> dict[str, Any]:
        """Load a directory of :meth:`save_training_state`; return its metadata, ``{}`` if it has none.

        Raises:
            FileNotFoundError: If the directory does not exist.
            CheckpointError: If it is of another model or other optimizers, or holds code.
        """
        folder = Path(input_dir)
        session = self._det_core
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a directory with a training state")
        if not session.run.is_begun:
            session.run = Run()
        session.is_loaded = True
        metadata: dict[str, Any] = {}
        if (folder / METADATA).exists():
            metadata = completed(_state.load(folder / METADATA), dict)
        _load_parts(self, folder)
        if (folder / BESIDE).exists():
            state = _state.load(folder / BESIDE)
            if "position" not in state:
                state = {**state, **_state.read_version_1(folder)}
            _state.apply_extra(self, state)
        else:  # written by the original, which does not store the position within the epoch
            go_to(self, metadata)
        return metadata


def go_to(trainer: TrainerBase, metadata: Mapping[str, Any]) -> None:
    """Move to the start of the epoch named in a training state's metadata."""
    trainer._det_core.run.epoch = max(int(metadata.get("current_epoch", 0)), 1) - 1
    trainer.run_history._set_epoch(trainer._det_core.run.epoch + 1)


def _save(trainer: TrainerBase, folder: Path, more: Mapping[str, Any] | None) -> None:
    """Write a staging directory, and move it into place."""
    strategy = trainer._det_core.strategy
    staging = folder.with_name(f".{folder.name}.being-written")
    everyone = strategy.gather_objects(_state.rank_state(trainer))
    if strategy.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)  # of a process that died while it saved
        staging.mkdir(parents=True)
    strategy.wait_for_everyone()
    checkpointing = require("accelerate.checkpointing", **NEEDED)
    schedulers = _readable_states(trainer, "schedulers", as_list(trainer.scheduler))
    if strategy.is_whole:
        optimizers = [strategy.unwrap_optimizer(optimizer) for optimizer in as_list(trainer.optimizer)]
        model = strategy.bare(trainer.model).state_dict()
        checkpointing.save_accelerator_state(
            str(staging), [model], _readable_states(trainer, "optimizers", optimizers), [], [], strategy.process_index,
            0, strategy.scaler,
        )  # fmt: skip
        if strategy.is_main_process:
            for i, scheduler in enumerate(schedulers):
                torch.save(scheduler.state_dict(), staging / f"custom_checkpoint_{i}.pkl")
    else:  # shards, whose format only accelerate knows
        trainer._accelerator._custom_objects = schedulers
        trainer._accelerator.save_state(str(staging))
    if strategy.is_main_process:
        torch.save(_state.readable(trainer, _state.extra_state(trainer, everyone)), staging / BESIDE)
        metadata = {"current_epoch": trainer.run_history.current_epoch, **(more or {})}
        torch.save(_state.readable(trainer, _state.to_python(metadata)), staging / METADATA)
    strategy.wait_for_everyone()
    if strategy.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    strategy.wait_for_everyone()


class _Saved:
    """A state in the form of an object, as accelerate's functions require."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def _readable_states(trainer: TrainerBase, name: str, owners: list[Any]) -> list[_Saved]:
    """Return the states of optimizers or schedulers, without unreadable entries."""
    states = [_state.to_python(owner.state_dict()) for owner in owners]
    return [_Saved(state) for state in _state.readable(trainer, {name: states})[name]]


def _load_parts(trainer: TrainerBase, folder: Path) -> None:
    """Load the files of accelerate's layout, without pickles that can run code."""
    strategy = trainer._det_core.strategy
    schedulers = as_list(trainer.scheduler)
    checkpointing = require("accelerate.checkpointing", **NEEDED)
    with fitting(folder):
        if strategy.is_whole:
            model = strategy.bare(trainer.model)
            if (folder / "model.safetensors").exists():
                _load_safetensors(model, folder / "model.safetensors")
            else:
                load_model(model, completed(_state.load(folder / "pytorch_model.bin"), model.state_dict))
            for i, optimizer in enumerate(as_list(trainer.optimizer)):
                saved = _state.load(folder / (f"optimizer_{i}.bin" if i else "optimizer.bin"))
                plain = strategy.unwrap_optimizer(optimizer)
                load_optimizer(plain, completed(saved, plain.state_dict))
            if strategy.scaler is not None and (folder / "scaler.pt").exists():
                strategy.scaler.load_state_dict(_state.load(folder / "scaler.pt"))
            checkpointing.load_accelerator_state(str(folder), [], [], [], [], strategy.process_index)  # random states
        else:
            trainer._accelerator._custom_objects = []  # accelerate would load them as pickles
            trainer._accelerator.load_state(str(folder))
        # the original registered the scheduler once more at each save, so its folders may hold several states of it
        found = len(list(folder.glob("custom_checkpoint_*.pkl")))
        if schedulers and found != len(schedulers) and not (found and len(schedulers) == 1):
            raise CheckpointError(f"{folder} holds {found} schedulers, and this training has {len(schedulers)}")
        for i, scheduler in enumerate(schedulers):
            saved = _state.load(folder / f"custom_checkpoint_{i}.pkl")
            scheduler.load_state_dict(completed(saved, scheduler.state_dict))


def _load_safetensors(model: torch.nn.Module, path: Path) -> None:
    safetensors = require("safetensors.torch", **NEEDED)
    try:
        safetensors.load_model(model, path)
    except require("safetensors", **NEEDED).SafetensorError as e:
        raise CheckpointError(f"{path} is damaged: {e}") from None


def _one_or_many(states: list[Any]) -> Any:
    if len(states) == 1:
        return states[0]
    return states
