"""What a user saves: a checkpoint in one file, and folders in accelerate's layout that a training goes on from.

Such a folder has ``model.safetensors``, ``optimizer.bin``, ``custom_checkpoint_<n>.pkl`` (schedulers), ``scaler.pt``,
``random_states_<rank>.pkl`` and ``trainer_metadata.pt``, as the original writes them, and ``trainer_state.pt`` beside
them: what a checkpoint of the core has more.
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
from det_core.accelerated._base import Run, TrainerBase, listed
from det_core.accelerated._strategy import NEEDED
from det_core.errors import CheckpointError

METADATA = "trainer_metadata.pt"
BESIDE = "trainer_state.pt"


class Saves(TrainerBase):
    """Saving and loading, by the user or by callbacks."""

    def save_checkpoint(
        self, save_path: Any, checkpoint_kwargs: Mapping[str, Any] | None = None, save_optimizer: bool = True,
        save_scheduler: bool = True, save_per_node: bool = True,
    ) -> None:  # fmt: skip
        """Write model, optimizer and scheduler to one file, which ``torch.load(weights_only=True)`` reads.

        Args:
            save_path: the file.
            checkpoint_kwargs: more keys of it.
            save_optimizer, save_scheduler: what is in it beside the model.
            save_per_node: write it on each machine, not on the first alone.
        """
        strategy = self._det_core.strategy
        path = Path(save_path)
        strategy.wait_for_everyone()
        if not (strategy.is_local_main_process if save_per_node else strategy.is_main_process):
            return
        content: dict[str, Any] = {"model_state_dict": strategy.bare(self.model).state_dict()}
        optimizers = listed(self.optimizer)
        schedulers = listed(self.scheduler)
        if save_optimizer and optimizers:
            content["optimizer_state_dict"] = _one_or_many([o.state_dict() for o in optimizers])
        if save_scheduler and schedulers:
            try:
                content["scheduler_state_dict"] = _one_or_many([s.state_dict() for s in schedulers])
            except Exception as e:
                self.print(f"The scheduler's state is not saved, as its state_dict() failed: {e}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as staging:  # an old file is there until the new one is whole
            torch.save(_state.readable(self, _state.python({**content, **(checkpoint_kwargs or {})})), staging)

    def load_checkpoint(
        self, checkpoint_path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a file of :meth:`save_checkpoint`, and return all that is in it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds an optimizer or a scheduler, and this Trainer has none.
            CheckpointError: it is of another model, or holds code.
        """
        strategy = self._det_core.strategy
        strategy.wait_for_everyone()
        content: dict[str, Any] = _state.load(Path(checkpoint_path))
        wanted = []
        parts = {"optimizer": (load_optimizer, self.optimizer), "scheduler": (load_scheduler, self.scheduler)}
        for name, (wants, part) in parts.items():
            have = listed(part)
            saved = content.get(f"{name}_state_dict")
            if saved is None or not wants:
                continue
            if not have:
                raise ValueError(
                    f"{checkpoint_path} holds the state of a {name}, and this Trainer has none: give load_{name}=False "
                    "to pass over it"
                )
            wanted.append((have, saved if isinstance(saved, list) else [saved]))
        with fitting(checkpoint_path):
            model = strategy.bare(self.model)
            load_model(model, completed(content["model_state_dict"], model.state_dict))
        for have, saved in wanted:
            for one, state in zip(have, saved, strict=True):
                one.load_state_dict(completed(state, one.state_dict))
        return completed(content, dict)

    def save_training_state(self, output_dir: Any, checkpoint_kwargs: Mapping[str, Any] | None = None) -> None:
        """Save all that ``train(resume_from=)`` needs into a folder, which is whole or not there; every rank calls it.

        Called within a step, this is done after the update that the step belongs to.
        """
        self._det_core.after_update(lambda: _save(self, Path(output_dir), checkpoint_kwargs))

    def load_training_state(self, input_dir: Any) -> dict[str, Any]:
        """Load a folder of :meth:`save_training_state`; returns its metadata, ``{}`` where there is none.

        Raises:
            FileNotFoundError: there is no such folder.
            CheckpointError: it is of another model or other optimizers, or holds code.
        """
        folder = Path(input_dir)
        session = self._det_core
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder with a training state")
        if not session.run.is_begun:
            session.run = Run()
        session.is_loaded = True
        metadata: dict[str, Any] = _state.load(folder / METADATA) if (folder / METADATA).exists() else {}
        metadata = completed(metadata, dict)
        _load_parts(self, folder)
        if (folder / BESIDE).exists():
            state = _state.load(folder / BESIDE)
            _state.apply_beside(self, state if "position" in state else {**state, **_state.read_version_1(folder)})
        else:  # of the original's, which does not say how much of its epoch was done
            go_to(self, metadata)
        return metadata


def go_to(trainer: TrainerBase, metadata: Mapping[str, Any]) -> None:
    """Go to the beginning of the epoch that a training state's metadata name."""
    trainer._det_core.run.epoch = max(int(metadata.get("current_epoch", 0)), 1) - 1
    trainer.run_history._set_epoch(trainer._det_core.run.epoch + 1)


def _save(trainer: TrainerBase, folder: Path, more: Mapping[str, Any] | None) -> None:
    """Write a folder aside, and put it in its place."""
    strategy = trainer._det_core.strategy
    aside = folder.with_name(f".{folder.name}.being-written")
    everyone = strategy.gather_objects(_state.rank_state(trainer))
    if strategy.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    strategy.wait_for_everyone()
    checkpointing = require("accelerate.checkpointing", **NEEDED)
    schedulers = _readable_states(trainer, "schedulers", listed(trainer.scheduler))
    if strategy.is_whole:
        optimizers = [strategy.unwrap_optimizer(optimizer) for optimizer in listed(trainer.optimizer)]
        model = strategy.bare(trainer.model).state_dict()
        checkpointing.save_accelerator_state(
            str(aside), [model], _readable_states(trainer, "optimizers", optimizers), [], [], strategy.process_index, 0,
            strategy.scaler,
        )  # fmt: skip
        if strategy.is_main_process:
            for i, scheduler in enumerate(schedulers):
                torch.save(scheduler.state_dict(), aside / f"custom_checkpoint_{i}.pkl")
    else:  # shards, which accelerate knows to write
        trainer._accelerator._custom_objects = schedulers
        trainer._accelerator.save_state(str(aside))
    if strategy.is_main_process:
        torch.save(_state.readable(trainer, _state.beside(trainer, everyone)), aside / BESIDE)
        metadata = {"current_epoch": trainer.run_history.current_epoch, **(more or {})}
        torch.save(_state.readable(trainer, _state.python(metadata)), aside / METADATA)
    strategy.wait_for_everyone()
    if strategy.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    strategy.wait_for_everyone()


class _Saved:
    """An object with a state, as accelerate's functions take them."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def _readable_states(trainer: TrainerBase, name: str, owners: list[Any]) -> list[_Saved]:
    """Return the states of optimizers or schedulers, without what could not be read back."""
    states = [_state.python(owner.state_dict()) for owner in owners]
    return [_Saved(state) for state in _state.readable(trainer, {name: states})[name]]


def _load_parts(trainer: TrainerBase, folder: Path) -> None:
    """Load what accelerate has laid out, none of it by a pickle that runs code."""
    strategy = trainer._det_core.strategy
    schedulers = listed(trainer.scheduler)
    checkpointing = require("accelerate.checkpointing", **NEEDED)
    with fitting(folder):
        if strategy.is_whole:
            model = strategy.bare(trainer.model)
            if (folder / "model.safetensors").exists():
                _load_safetensors(model, folder / "model.safetensors")
            else:
                load_model(model, completed(_state.load(folder / "pytorch_model.bin"), model.state_dict))
            for i, optimizer in enumerate(listed(trainer.optimizer)):
                saved = _state.load(folder / (f"optimizer_{i}.bin" if i else "optimizer.bin"))
                plain = strategy.unwrap_optimizer(optimizer)
                load_optimizer(plain, completed(saved, plain.state_dict))
            if strategy.scaler is not None and (folder / "scaler.pt").exists():
                strategy.scaler.load_state_dict(_state.load(folder / "scaler.pt"))
            checkpointing.load_accelerator_state(str(folder), [], [], [], [], strategy.process_index)  # random states
        else:
            trainer._accelerator._custom_objects = []  # which accelerate would load as pickles
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
    return states[0] if len(states) == 1 else states
