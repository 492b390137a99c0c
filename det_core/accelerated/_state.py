"""What checkpoints and training states hold, in which file: writing, reading, applying.

A checkpoint of the core has ``state.pt`` (model, optimizers, scheduler, scaler, history, callbacks: the same on every
rank), ``trainer_state.json`` (where in the training this is) and ``rng_rank<r>.pth`` (each rank's random states, loss
sums and training metrics). All of it is read with ``weights_only``, and is the same with and without accelerate. A
training state is a folder in accelerate's own layout, with the last two files and ``trainer_state.pt`` beside it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from det_core._training.strategy import fitting, load_model
from det_core.errors import CheckpointError, MissingExtra

if TYPE_CHECKING:
    from det_core.accelerated._loop import TrainingLoop

logger = logging.getLogger("det_core.accelerated")
STATE, COUNTERS, METADATA, BESIDE = "state.pt", "trainer_state.json", "trainer_metadata.pt", "trainer_state.pt"
VERSION = 1


@dataclass
class Resumed:
    """What is put back only once a run has begun: callbacks reset themselves then, and draw random numbers."""

    callbacks: Mapping[str, Any]
    random: Mapping[str, Any] | None


# one checkpoint file of the user's


def save_checkpoint(
    trainer: TrainingLoop,
    save_path: str | os.PathLike[str],
    checkpoint_kwargs: Mapping[str, Any] | None,
    save_optimizer: bool,
    save_scheduler: bool,
    save_per_node: bool,
) -> None:
    """Write one file, on the ranks that are to."""
    strategy = trainer._strategy
    strategy.wait_for_everyone()
    if not (strategy.is_local_main_process if save_per_node else strategy.is_main_process):
        return
    content: dict[str, Any] = {"model_state_dict": strategy.bare(trainer.model).state_dict()}
    if save_optimizer and trainer.optimizers:
        content["optimizer_state_dict"] = _one_or_many([o.state_dict() for o in trainer.optimizers])
    if save_scheduler and trainer.scheduler is not None:
        try:
            content["scheduler_state_dict"] = _one_or_many([s.state_dict() for s in trainer.schedulers])
        except Exception as e:
            trainer.print(f"The scheduler's state is not saved, as its state_dict() failed: {e}")
    _write(Path(save_path), _python({**content, **(checkpoint_kwargs or {})}))


def load_checkpoint(
    trainer: TrainingLoop, path: str | os.PathLike[str], load_optimizer: bool, load_scheduler: bool
) -> dict[str, Any]:
    """Load what a file of :func:`save_checkpoint` holds; all that is in it."""
    trainer._strategy.wait_for_everyone()
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    wanted = []
    for name, wants, have in (
        ("optimizer", load_optimizer, trainer.optimizers),
        ("scheduler", load_scheduler, trainer.schedulers),
    ):
        saved = content.get(f"{name}_state_dict")
        if saved is None or not wants:
            continue
        if not have:
            raise ValueError(
                f"{path} holds the state of a {name}, and this Trainer has none: give load_{name}=False to pass over it"
            )
        wanted.append((have, saved if isinstance(saved, list) else [saved]))
    with fitting(path):
        load_model(trainer._strategy.bare(trainer.model), content["model_state_dict"])
    for have, saved in wanted:
        for one, state in zip(have, saved, strict=True):
            one.load_state_dict(state)
    return content


# what the core keeps


def whole(trainer: TrainingLoop) -> dict[str, Any]:
    """What is the same on every rank.

    Raises:
        CheckpointError: a scheduler's state could not be read again.
    """
    state = trainer._strategy.state(trainer.model, trainer.optimizers)
    schedulers = _python({f"scheduler {i}": s.state_dict() for i, s in enumerate(trainer.schedulers)})
    for scheduler, saved in zip(trainer.schedulers, schedulers.values(), strict=True):
        if not _is_plain(saved):
            raise CheckpointError(
                f"no training could go on from this checkpoint, as the state of {type(scheduler).__name__} holds more "
                "than tensors, numbers, strings, lists and dictionaries: give it a state_dict() of such"
            )
    return {**state, "optimizers": _python(state["optimizers"]), "schedulers": schedulers, **_beside(trainer)}


def _beside(trainer: TrainingLoop) -> dict[str, Any]:
    """History and callbacks."""
    history = trainer.run_history
    callbacks = {
        type(callback).__name__: _python(callback.state_dict())
        for callback in trainer.callback_handler
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
    }
    values = {name: _python(history.get_metric_values(name)) for name in history.get_metric_names()}
    return {"history": _readable(values), "current_epoch": history.current_epoch, "callbacks": _readable(callbacks)}


def own(trainer: TrainingLoop) -> bytes:
    """What each rank has of its own."""
    from det_core.core import random_state

    tracker, run = trainer._loss_tracker, trainer._run
    state = {
        "random": random_state(),
        "loss": [float(tracker.total_loss), tracker.running_count],
        "window": [float(number) for number in run.window],
        "norms": [float(norm) for norm in run.norms],
        "metrics": {name: _counted(metric) for name, metric in _named(trainer._train_metrics)},
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def counters(trainer: TrainingLoop, number: int, trial_id: int = 0, stopped: bool = False) -> bytes:
    """Where in the training this is.

    Args:
        trainer: the trainer.
        number: which of the script's runs this is.
        trial_id: the trial; 0 in a bare run.
        stopped: whether a :class:`StopTrainingError` has ended the run.
    """
    run = trainer._run
    told = {
        "version": VERSION, "trial_id": trial_id, "run": number, "epoch": run.epoch, "batch": run.batch,
        "part": run.part, "updates": run.updates, "base": run.base, "seed": trainer._seed,
        "size": trainer._strategy.num_processes, "batch_size": _batch_size(trainer), "stopped": stopped,
    }  # fmt: skip
    return json.dumps(told).encode()


def read_counters(folder: Path) -> dict[str, Any]:
    """Where a checkpoint's training was.

    Raises:
        CheckpointError: it is not one of a Trainer.
    """
    try:
        told: dict[str, Any] = json.loads((folder / COUNTERS).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint in {folder} is not one of an accelerated Trainer: it has no {COUNTERS}, but "
            f"{', '.join(sorted(path.name for path in folder.iterdir()))}"
        ) from None
    return told


def apply(trainer: TrainingLoop, folder: Path, told: Mapping[str, Any], *, anew: bool = False) -> None:
    """Go on from a checkpoint of the core.

    Args:
        trainer: the trainer.
        folder: the checkpoint.
        told: what :func:`read_counters` says of it.
        anew: begin a training with its weights and optimizers, rather than go on with its training.

    Raises:
        CheckpointError: it is of another model, other optimizers, or a training with other parts.
    """
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    for name, mine in (("optimizers", trainer.optimizers), ("schedulers", trainer.schedulers)):
        if not anew and len(state[name]) != len(mine):
            raise CheckpointError(f"the checkpoint holds {len(state[name])} {name}, and this training has {len(mine)}")
    with fitting(folder):
        trainer._strategy.load(trainer.model, trainer.optimizers, state)
    if anew:
        return
    for scheduler, saved in zip(trainer.schedulers, state["schedulers"].values(), strict=True):
        # a WSDLrScheduler's load_state_dict() may begin a new schedule, as the original's does
        getattr(scheduler, "_restore", scheduler.load_state_dict)(saved)
    _apply_position(trainer, folder, told)
    _apply_beside(trainer, state, _own(folder, trainer, told))


def pass_over(trainer: TrainingLoop, folder: Path, told: Mapping[str, Any]) -> bool:
    """Give a trainer the model and the history of a later training run's checkpoint, and the optimizers if they are
    alike; False: that is of another model, and nothing is changed."""
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    mine, saved = trainer._strategy.bare(trainer.model).state_dict(), state["model"]
    if mine.keys() != saved.keys() or any(torch.is_tensor(v) and v.shape != saved[k].shape for k, v in mine.items()):
        return False
    optimizers = [trainer._strategy.unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
    alike = _kinds(optimizer.state_dict() for optimizer in optimizers) == _kinds(state["optimizers"])
    trainer._strategy.load(trainer.model, *((optimizers, state) if alike else ([], {**state, "optimizers": []})))
    _apply_history(trainer, state)
    trainer._run.base = told["base"] + told["updates"]
    return True


def _kinds(optimizers: Iterable[Mapping[str, Any]]) -> list[Any]:
    """What states of optimizers must agree in to be of one kind: for each group its parameters and settings."""
    return [
        [(group["params"], group.keys() - {"initial_lr"}) for group in optimizer["param_groups"]]
        for optimizer in optimizers
    ]


def _apply_position(trainer: TrainingLoop, folder: Path, told: Mapping[str, Any]) -> None:
    run, size = trainer._run, trainer._strategy.num_processes
    run.epoch, run.part, run.updates, run.base = told["epoch"], told["part"], told["updates"], told["base"]
    now, before = _batch_size(trainer), told.get("batch_size")
    if now is None or before is None:  # it is not known, so it is taken to be as it was
        now = before = 1
    run.batch = -(-told["batch"] * told["size"] * before // (size * now))
    if told["size"] != size:
        trainer.print(
            f"{size} rank(s) go on where {told['size']} were: at batch {run.batch} of epoch {run.epoch + 1}, with "
            "other random numbers"
        )
    elif now != before:
        trainer.print(
            f"Batches of {now} go on where those of {before} were: at batch {run.batch} of epoch {run.epoch + 1}, "
            f"record {run.batch * size * now}; it was record {told['batch'] * size * before}"
        )
    if told["seed"] != trainer._seed:
        trainer._reseed(told["seed"])


def _batch_size(trainer: TrainingLoop) -> int | None:
    """Samples in a batch of a rank; None: it is not known."""
    size: int | None = getattr(trainer.run_config, "train_per_device_batch_size", None)
    return size


def _own(folder: Path, trainer: TrainingLoop, told: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank had; of another number of ranks, rank 0 takes the sums of all."""
    rank = trainer._strategy.process_index
    files = [folder / f"rng_rank{r}.pth" for r in range(told["size"])]
    if told["size"] == trainer._strategy.num_processes:
        own: dict[str, Any] = torch.load(files[rank], map_location="cpu", weights_only=True)
        return own
    everyone = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    sums = {
        name: [sum(each) if rank == 0 else 0 for each in zip(*(one[name] for one in everyone), strict=True)]
        for name in ("loss", "window")
    }
    return {"random": None, **sums, "norms": everyone[0]["norms"], "metrics": {}}


def _apply_beside(trainer: TrainingLoop, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    run, tracker = trainer._run, trainer._loss_tracker
    _apply_history(trainer, state)
    tracker.reset()
    tracker.total_loss, tracker.running_count = own["loss"][0], int(own["loss"][1])
    run.window = (own["window"][0], own["window"][1])
    run.norms = [torch.tensor(norm) for norm in own["norms"]]
    for name, metric in _named(trainer._train_metrics):
        for key, value in own["metrics"].get(name, {}).items():
            setattr(metric, key, value)
    trainer._move_metrics()
    trainer._resumed = Resumed(state["callbacks"], own["random"])


def _apply_history(trainer: TrainingLoop, state: Mapping[str, Any]) -> None:
    history, prefix = trainer.run_history, trainer.run_history.metric_name_prefix
    history.reset()
    history.set_metric_name_prefix("")  # the names are whole
    for name, values in state["history"].items():
        for value in values:
            history.update_metric(name, value)
    history.set_metric_name_prefix(prefix)
    history._set_epoch(state["current_epoch"])


# accelerate's layout


def save_training_state(
    trainer: TrainingLoop, output_dir: str | os.PathLike[str], checkpoint_kwargs: Mapping[str, Any] | None
) -> None:
    """Write a folder in accelerate's layout, aside first, so that it is whole or not there."""
    accelerator, strategy = _accelerator(trainer), trainer._strategy
    folder = Path(output_dir)
    aside = folder.with_name(f".{folder.name}.being-written")
    if strategy.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    strategy.wait_for_everyone()
    _register(accelerator, trainer)
    accelerator.save_state(str(aside))
    (aside / f"rng_rank{strategy.process_index}.pth").write_bytes(own(trainer))
    if strategy.is_main_process:
        (aside / COUNTERS).write_bytes(counters(trainer, 0))
        torch.save(_beside(trainer), aside / BESIDE)
        metadata = {"current_epoch": trainer.run_history.current_epoch, **(checkpoint_kwargs or {})}
        torch.save(_python(metadata), aside / METADATA)
    strategy.wait_for_everyone()
    if strategy.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    strategy.wait_for_everyone()


def load_training_state(trainer: TrainingLoop, input_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from a folder of :func:`save_training_state`, or from one that the original has written."""
    folder = Path(input_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder with a training state")
    accelerator = _accelerator(trainer)
    _register(accelerator, trainer)
    registered = list(accelerator._custom_objects)
    # the original registered the scheduler once more at each save, so its folders may hold several states of it
    found = len(list(folder.glob("custom_checkpoint_*.pkl")))
    accelerator._custom_objects = registered * found if len(registered) == 1 else registered
    try:
        with fitting(folder):
            accelerator.load_state(str(folder))
    finally:
        accelerator._custom_objects = registered
    metadata: dict[str, Any] = {}
    if (folder / METADATA).exists():
        metadata = torch.load(folder / METADATA, map_location="cpu", weights_only=True)
    if (folder / COUNTERS).exists():
        told = read_counters(folder)
        _apply_position(trainer, folder, told)
        beside = torch.load(folder / BESIDE, map_location="cpu", weights_only=True)
        _apply_beside(trainer, beside, _own(folder, trainer, told))
    else:
        epoch = max(int(metadata.get("current_epoch", 0)), 1)
        trainer.run_history._set_epoch(epoch)
        trainer._run.epoch = epoch - 1
    return metadata


def _accelerator(trainer: TrainingLoop) -> Any:
    accelerator = trainer._accelerator
    if not hasattr(accelerator, "save_state"):
        raise MissingExtra(
            "training states are folders in accelerate's layout, so they need accelerate. Install it: "
            "pip install 'accelerate>=1'; checkpoints of the core need nothing more: with core.init() as ctx: …"
        )
    if not accelerator._models:  # nothing would be saved or loaded
        raise CheckpointError(
            "training states are saved and loaded in a run or after one, and this Trainer has had none: go on from a "
            "state by train(resume_from=)"
        )
    return accelerator


def _register(accelerator: Any, trainer: TrainingLoop) -> None:
    for scheduler in trainer.schedulers:
        if not any(scheduler is known for known in accelerator._custom_objects):
            accelerator.register_for_checkpointing(scheduler)


# helpers


def _readable(states: Mapping[str, Any]) -> dict[str, Any]:
    """Those states that ``weights_only`` reads back; the others are named in a warning now, not at the resume."""
    kept = {name: state for name, state in states.items() if _is_plain(state)}
    for name in states.keys() - kept.keys():
        logger.warning(
            "the state of %s is not part of checkpoints, as it holds more than tensors, numbers, strings, lists and "
            "dictionaries", name,
        )  # fmt: skip
    return kept


def _python(value: Any) -> Any:
    """Numbers and arrays of numpy's, which ``weights_only`` refuses, as python's, at any depth."""
    if type(value).__module__ == "numpy":
        return value.tolist()
    if type(value) in (dict, Counter):  # an OrderedDict is a model's, and has attributes that would be lost
        return type(value)({_python(key): _python(one) for key, one in value.items()})
    return type(value)(map(_python, value)) if type(value) in (list, tuple, set) else value


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, OrderedDict, Counter):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    # by type: a number of numpy's is a float as well, and its pickle is refused
    return isinstance(value, torch.Tensor) or type(value) in (int, float, complex, bool, str, bytes, type(None))


def _named(metrics: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The single metrics in what ``train_metrics=`` was given, those within collections and wrappers too."""
    parts = metrics.items() if hasattr(metrics, "items") else getattr(metrics, "named_children", tuple)()
    if hasattr(metrics, "_defaults"):
        yield name, metrics
    for key, part in parts:
        yield from _named(part, f"{name}.{key}" if name else key)


def _counted(metric: Any) -> dict[str, Any]:
    """What a torchmetrics ``Metric`` has counted: the attributes that it resets."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {name: v.clone() if isinstance(v, torch.Tensor) else list(v) for name, v in values.items()}


def _one_or_many(states: list[Any]) -> Any:
    return states[0] if len(states) == 1 else states


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file aside and put it in place, so that an old one is there until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.being-written")
    torch.save(content, aside)
    os.replace(aside, path)
