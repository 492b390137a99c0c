"""Content of a Trainer's checkpoints in the core: how it is written, read and applied.

It is one file, ``state.pt``, that ``torch.load(weights_only=True)`` reads: ``model``, ``optimizers``, ``schedulers``,
``scaler``, ``history``, ``callbacks`` (equal on every rank), ``position`` (in the training), ``given``
(hyperparameters) and ``ranks`` (each rank's random states, loss sums and training metrics). Version 1 had the position
in ``trainer_state.json`` and ranks in ``rng_rank<r>.pth``.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from det_core._env import Environment
from det_core._json import to_builtin
from det_core._torch_states import is_plain, refused
from det_core._training.states import completed, naming_damage, readable_states, without_unreadable
from det_core._training.strategy import fitting
from det_core.accelerated._base import Position, TrainerBase, as_list, callbacks_of
from det_core.accelerated._data import batch_size_of, reseed
from det_core.errors import CheckpointError

logger = logging.getLogger("det_core.accelerated")
STATE = "state.pt"
COUNTERS = "trainer_state.json"
PARTS = ("model", "optimizers", "scaler", "schedulers")
VERSION = 2


@dataclass
class Resumed:
    """States to restore after the start of a run, at which callbacks reset themselves and draw random numbers."""

    callbacks: Mapping[str, Any]
    random: Mapping[str, Any] | None

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Restore the states of callbacks."""
        for name, callback in _names(callbacks):
            if (state := self.callbacks.get(name)) is not None:
                callback.load_state_dict(state)


def _names(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield callbacks that have a state, with the names of their classes, numbered if repeated."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name} {seen[name]}"
            yield name, callback


# Writing.


def rank_state(trainer: TrainerBase) -> dict[str, Any]:
    """Return the part of the state that differs between ranks."""
    from det_core.core import random_state

    tracker = trainer._loss_tracker
    run = trainer._det_core.run
    return {
        "random": random_state(),
        "loss": [float(tracker.total_loss), tracker.running_count],
        "window": [float(number) for number in run.window],
        "norms": [float(norm) for norm in run.norms],
        "metrics": {name: _counted(metric) for name, metric in _named(trainer._det_core.train_metrics)},
    }


def extra_state(
    trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]], number: int = 0, trial_id: int = 0, stopped: bool = False
) -> dict[str, Any]:
    """Return the state of a training without model, optimizers and schedulers.

    Args:
        trainer: the trainer.
        ranks: result of :func:`rank_state` of each rank.
        number: number of the run in the script, from 1.
        trial_id: ID of the trial; 0 in a bare run.
        stopped: whether a stop has ended the run for good.
    """
    run = trainer._det_core.run
    history = trainer.run_history
    callbacks = {name: to_python(callback.state_dict()) for name, callback in _names(callbacks_of(trainer))}
    values = {name: to_python(history.get_metric_values(name)) for name in history.get_metric_names()}
    readable_ones = partial(readable_states, load=load, log=logger, warned=trainer._det_core.warned)
    return {
        "history": readable_ones("metric", values), "current_epoch": history.current_epoch,
        "callbacks": readable_ones("callback", callbacks),
        "ranks": list(ranks), "given": _given(trainer),
        "position": {
            **{name: getattr(run, name) for name in Position.__dataclass_fields__},
            "version": VERSION, "trial_id": trial_id, "run": number, "seed": trainer._det_core.seed,
            "batch_size": batch_size_of(trainer._train_dataloader), "stopped": stopped,
        },
    }  # fmt: skip


def full_state(trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]], *more: Any) -> dict[str, Any]:
    """Return the state of a training; arguments as of :func:`extra_state`."""
    return readable(trainer, {**_parts(trainer), **extra_state(trainer, ranks, *more)})


def _parts(trainer: TrainerBase) -> dict[str, Any]:
    """Return the states of the model, the optimizers, the gradient scaler and the schedulers."""
    state = trainer._det_core.strategy.state(trainer.model, as_list(trainer.optimizer))
    schedulers = [scheduler.state_dict() for scheduler in as_list(trainer.scheduler)]
    return {**state, "optimizers": to_python(state["optimizers"]), "schedulers": to_python(schedulers)}


def readable(trainer: TrainerBase, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without entries that :func:`load` could not read back; warn of those."""
    return without_unreadable(state, load, logger, trainer._det_core.warned)


def _given(trainer: TrainerBase) -> dict[str, Any]:
    """Return the hyperparameters of the trial and of optimizers, which a checkpoint overrides."""
    session = trainer._det_core
    hparams: dict[str, Any] = {}
    if session.managed is not None:
        hparams.update(session.managed.context.hparams)
    for i, optimizer in enumerate(as_list(trainer.optimizer)):
        defaults = getattr(session.strategy.unwrap_optimizer(optimizer), "defaults", {})
        suffix = f" of optimizer {i}" if i else ""
        hparams.update({f"{name}{suffix}": value for name, value in defaults.items()})
    return {str(name): value for name, value in to_python(hparams).items() if is_plain(value)}


# Reading.


def load(path: Path | IO[bytes]) -> Any:
    """Return the content of a file of ``torch.save()``; code only where ``DET_CORE_ALLOW_PICKLE`` lets it run.

    Raises:
        CheckpointError: If the file holds code, or is damaged.
    """
    try:
        with naming_damage(path):
            return torch.load(path, map_location="cpu", weights_only=not Environment.read().allow_pickle)
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds more than tensors, numbers, strings, lists and dictionaries, {refused(e)}, and is not read, "
            "as that could run code; if you trust whoever wrote it, set DET_CORE_ALLOW_PICKLE=1"
        ) from e


def read(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint.

    Raises:
        CheckpointError: If it is not a Trainer's, or of a later version.
    """
    state: dict[str, Any] = {}
    if (folder / STATE).exists():
        state = load(folder / STATE)
    if "position" not in state and (folder / COUNTERS).exists():
        state = {**state, **read_version_1(folder), "schedulers": list(state.get("schedulers", {}).values())}
    if not isinstance(state.get("position"), dict):
        files = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise CheckpointError(f"the checkpoint in {folder} is not one of an accelerated Trainer: it has {files}")
    if state["position"]["version"] > VERSION:
        raise CheckpointError(f"the checkpoint in {folder} was written by a later det_core: use that one")
    return state


def read_version_1(folder: Path) -> dict[str, Any]:
    """Return the position and the states of ranks from the separate files of version 1."""
    position = json.loads((folder / COUNTERS).read_bytes())
    ranks = [load(folder / f"rng_rank{rank}.pth") for rank in range(position["size"])]
    is_fresh = any(rank["loss"][1] for rank in ranks) and all(rank["window"][1] == rank["loss"][1] for rank in ranks)
    position["reported"] = 0
    if is_fresh:
        position["reported"] = position["updates"]
    return {"position": position, "ranks": ranks}


# Applying.


def apply(trainer: TrainerBase, folder: Path, state: Mapping[str, Any], *, anew: bool = False) -> None:
    """Continue from a checkpoint.

    Args:
        trainer: the trainer.
        folder: directory of the checkpoint.
        state: its content, of :func:`read`.
        anew: whether to start a new training with its weights and optimizers, rather than to resume.

    Raises:
        CheckpointError: If it is of another model, or of other numbers of optimizers or schedulers.
    """
    optimizers = as_list(trainer.optimizer)
    schedulers = as_list(trainer.scheduler)
    for name, mine in (("optimizers", optimizers), ("schedulers", schedulers)):
        if not anew and len(state[name]) != len(mine):
            raise CheckpointError(f"the checkpoint holds {len(state[name])} {name}, and this training has {len(mine)}")
    state = {**state, **completed({name: state.get(name) for name in PARTS}, lambda: _parts(trainer))}
    with fitting(folder):
        trainer._det_core.strategy.load(trainer.model, optimizers, state)
    if anew:
        return
    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        # a WSDLrScheduler's load_state_dict() may begin a new schedule, as the original's does
        getattr(scheduler, "_restore", scheduler.load_state_dict)(saved)
    apply_extra(trainer, state)


def apply_extra(trainer: TrainerBase, state: Mapping[str, Any]) -> None:
    """Restore the state of :func:`extra_state`."""
    session = trainer._det_core
    tracker = trainer._loss_tracker
    run = session.run
    _apply_position(trainer, state["position"], len(state["ranks"]))
    _apply_history(trainer, state)
    mine = _own_rank_state(trainer, completed(state["ranks"], list))
    tracker.reset()
    tracker.total_loss = mine["loss"][0]
    tracker.running_count = int(mine["loss"][1])
    run.window = (mine["window"][0], mine["window"][1])
    run.norms = [torch.tensor(norm) for norm in mine["norms"]]
    for name, metric in _named(session.train_metrics):
        for key, value in mine["metrics"].get(name, {}).items():
            setattr(metric, key, value)
    session.move_metrics()
    session.resumed = Resumed(state["callbacks"], mine["random"])
    before = state.get("given", {})
    now = _given(trainer)
    differ = sorted(name for name in before.keys() & now.keys() if repr(before[name]) != repr(now[name]))
    if differ:
        changed = ", ".join(f"{name}={before[name]} (given now: {now[name]})" for name in differ)
        trainer.print(f"The checkpoint overrules what the script gives: this training goes on with {changed}")


def skip_finished_run(trainer: TrainerBase, state: Mapping[str, Any]) -> str:
    """Load model and history from the checkpoint of a later run; return a phrase about the loaded model."""
    strategy = trainer._det_core.strategy
    mine = strategy.bare(trainer.model).state_dict()
    saved = state["model"]
    if mine.keys() != saved.keys() or any(torch.is_tensor(v) and v.shape != saved[k].shape for k, v in mine.items()):
        return "with the model as it is: the checkpoint has another"
    model = completed(saved, mine.copy)
    strategy.load(trainer.model, (), {**state, "model": model, "optimizers": ()})
    _apply_history(trainer, state)
    trainer._det_core.run.base = state["position"]["base"] + state["position"]["updates"]
    return f"with the model of run {state['position']['run']}"


def _apply_position(trainer: TrainerBase, position: Mapping[str, Any], ranks: int) -> None:
    session = trainer._det_core
    run = session.run
    size = session.strategy.num_processes
    for name in Position.__dataclass_fields__:
        setattr(run, name, position[name])
    now = batch_size_of(trainer._train_dataloader)
    before = position["batch_size"]
    if now is None or before is None:  # unknown: assume that it has not changed
        now = before = 1
    record = position["batch"] * ranks * before
    run.batch = -(-record // (size * now))
    if (ranks, before) != (size, now):
        trainer.print(
            f"{size} rank(s) with batches of {now} go on where {ranks} with batches of {before} were: at batch "
            f"{run.batch} of epoch {run.epoch + 1}, record {run.batch * size * now}; it was record {record}"
        )
    if position["seed"] != session.seed:  # batches seen before must not come again in this epoch
        session.seed = position["seed"]
        for loader in (trainer._train_dataloader, trainer._eval_dataloader):
            reseed(loader, session.seed)


def _own_rank_state(trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state of this rank; if the number of ranks has changed, rank 0 gets the sums of all."""
    rank = trainer._det_core.strategy.process_index
    if len(ranks) == trainer._det_core.strategy.num_processes:
        return ranks[rank]
    sums = {
        name: [sum(each) for each in zip(*(old[name] for old in ranks), strict=True)] for name in ("loss", "window")
    }
    if rank != 0:  # the sums are added over ranks once more when they are reported
        sums = {name: [0, 0] for name in sums}
    return {"random": None, **sums, "norms": ranks[0]["norms"], "metrics": {}}


def _apply_history(trainer: TrainerBase, state: Mapping[str, Any]) -> None:
    history = trainer.run_history
    prefix = trainer.run_history.metric_name_prefix
    history.reset()
    history.set_metric_name_prefix("")  # saved names include it
    for name, values in state["history"].items():
        for value in values:
            history.update_metric(name, value)
    history.set_metric_name_prefix(prefix)
    history._set_epoch(state["current_epoch"])


# Helpers.


def to_python(value: Any) -> Any:
    """Convert numbers and arrays of numpy, which ``weights_only`` rejects, to Python's, at any depth."""
    if type(value).__module__ == "numpy":
        return to_builtin(value)
    if type(value) in (dict, Counter):  # not an OrderedDict: a model's has attributes, such as _metadata
        return type(value)({to_python(key): to_python(item) for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(map(to_python, value))
    return value


def _named(metrics: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single metrics of ``train_metrics=`` with their names, including those in collections and wrappers."""
    if hasattr(metrics, "items"):
        parts = metrics.items()
    else:
        parts = getattr(metrics, "named_children", tuple)()
    if hasattr(metrics, "_defaults"):
        yield name, metrics
    for key, part in parts:
        yield from _named(part, f"{name}.{key}" if name else key)


def _counted(metric: Any) -> dict[str, Any]:
    """Return the state of a torchmetrics ``Metric``, the attributes that it resets."""
    state: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()  # the metric may update it in place
        else:
            state[name] = list(value)
    return state
