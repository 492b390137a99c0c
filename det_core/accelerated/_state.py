"""What a checkpoint of the core holds: writing, reading, applying.

It is one file, ``state.pt``, that ``torch.load(weights_only=True)`` reads: ``model``, ``optimizers``, ``schedulers``,
``scaler``, ``history``, ``callbacks`` (the same on every rank), ``position`` (where in the training this is), ``given``
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
from det_core.accelerated._base import Position, TrainerBase, callbacks_of, listed
from det_core.accelerated._data import batch_size_of, reseed
from det_core.errors import CheckpointError

logger = logging.getLogger("det_core.accelerated")
STATE = "state.pt"
COUNTERS = "trainer_state.json"
PARTS = ("model", "optimizers", "scaler", "schedulers")
VERSION = 2


@dataclass
class Resumed:
    """What is put back only once a run has begun: callbacks reset themselves then, and draw random numbers."""

    callbacks: Mapping[str, Any]
    random: Mapping[str, Any] | None

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Put back the states of callbacks."""
        for name, callback in _names(callbacks):
            if (state := self.callbacks.get(name)) is not None:
                callback.load_state_dict(state)


def _names(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Callbacks that have a state, by the name of their class; of several classes of one name, the later ones have
    their place among these behind it."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}", callback


# writing


def rank_state(trainer: TrainerBase) -> dict[str, Any]:
    """What each rank has of its own."""
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


def beside(
    trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]], number: int = 0, trial_id: int = 0, stopped: bool = False
) -> dict[str, Any]:
    """All of a training but its model, optimizers and schedulers.

    Args:
        trainer: the trainer.
        ranks: what :func:`rank_state` gave on each rank.
        number: which of the script's runs this is.
        trial_id: the trial; 0 in a bare run.
        stopped: whether a stop has ended the run for good.
    """
    run = trainer._det_core.run
    history = trainer.run_history
    callbacks = {name: python(callback.state_dict()) for name, callback in _names(callbacks_of(trainer))}
    values = {name: python(history.get_metric_values(name)) for name in history.get_metric_names()}
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


def whole(trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]], *more: Any) -> dict[str, Any]:
    """All of a training; arguments as of :func:`beside`."""
    return readable(trainer, {**_parts(trainer), **beside(trainer, ranks, *more)})


def _parts(trainer: TrainerBase) -> dict[str, Any]:
    """Return the states of the model, the optimizers, the gradient scaler and the schedulers."""
    state = trainer._det_core.strategy.state(trainer.model, listed(trainer.optimizer))
    schedulers = [scheduler.state_dict() for scheduler in listed(trainer.scheduler)]
    return {**state, "optimizers": python(state["optimizers"]), "schedulers": python(schedulers)}


def readable(trainer: TrainerBase, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without what :func:`load` could not read back, with a warning of that."""
    return without_unreadable(state, load, logger, trainer._det_core.warned)


def _given(trainer: TrainerBase) -> dict[str, Any]:
    """The hyperparameters that a script gives, which a checkpoint overrules: those of the trial and of optimizers."""
    session = trainer._det_core
    found = dict(session.managed.context.hparams) if session.managed is not None else {}
    for i, optimizer in enumerate(listed(trainer.optimizer)):
        defaults = getattr(session.strategy.unwrap_optimizer(optimizer), "defaults", {})
        found.update({f"{name}{f' of optimizer {i}' if i else ''}": value for name, value in defaults.items()})
    return {str(name): value for name, value in python(found).items() if is_plain(value)}


# reading


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
    """What is in a checkpoint.

    Raises:
        CheckpointError: it is not one of a Trainer, or of a later version.
    """
    state: dict[str, Any] = load(folder / STATE) if (folder / STATE).exists() else {}
    if "position" not in state and (folder / COUNTERS).exists():
        state = {**state, **read_version_1(folder), "schedulers": list(state.get("schedulers", {}).values())}
    if not isinstance(state.get("position"), dict):
        there = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise CheckpointError(f"the checkpoint in {folder} is not one of an accelerated Trainer: it has {there}")
    if state["position"]["version"] > VERSION:
        raise CheckpointError(f"the checkpoint in {folder} was written by a later det_core: use that one")
    return state


def read_version_1(folder: Path) -> dict[str, Any]:
    """Position and ranks, from files of their own."""
    position = json.loads((folder / COUNTERS).read_bytes())
    ranks = [load(folder / f"rng_rank{rank}.pth") for rank in range(position["size"])]
    is_fresh = any(rank["loss"][1] for rank in ranks) and all(rank["window"][1] == rank["loss"][1] for rank in ranks)
    return {"position": {**position, "reported": position["updates"] if is_fresh else 0}, "ranks": ranks}


# applying


def apply(trainer: TrainerBase, folder: Path, state: Mapping[str, Any], *, anew: bool = False) -> None:
    """Go on from a checkpoint.

    Args:
        trainer: the trainer.
        folder: where it is from.
        state: what :func:`read` gave.
        anew: begin a training with its weights and optimizers, rather than go on with its training.

    Raises:
        CheckpointError: it is of another model, other optimizers, or a training with other parts.
    """
    optimizers = listed(trainer.optimizer)
    schedulers = listed(trainer.scheduler)
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
    apply_beside(trainer, state)


def apply_beside(trainer: TrainerBase, state: Mapping[str, Any]) -> None:
    """Go on with all of a training but its model, optimizers and schedulers."""
    session = trainer._det_core
    tracker = trainer._loss_tracker
    run = session.run
    _apply_position(trainer, state["position"], len(state["ranks"]))
    _apply_history(trainer, state)
    had = _mine(trainer, completed(state["ranks"], list))
    tracker.reset()
    tracker.total_loss, tracker.running_count = had["loss"][0], int(had["loss"][1])
    run.window = (had["window"][0], had["window"][1])
    run.norms = [torch.tensor(norm) for norm in had["norms"]]
    for name, metric in _named(session.train_metrics):
        for key, value in had["metrics"].get(name, {}).items():
            setattr(metric, key, value)
    session.move_metrics()
    session.resumed = Resumed(state["callbacks"], had["random"])
    before = state.get("given", {})
    now = _given(trainer)
    differ = sorted(name for name in before.keys() & now.keys() if repr(before[name]) != repr(now[name]))
    if differ:
        changed = ", ".join(f"{name}={before[name]} (given now: {now[name]})" for name in differ)
        trainer.print(f"The checkpoint overrules what the script gives: this training goes on with {changed}")


def pass_over(trainer: TrainerBase, state: Mapping[str, Any]) -> str:
    """Give a trainer the model and the history of a later training run's checkpoint; says which model it has now."""
    strategy = trainer._det_core.strategy
    mine, saved = strategy.bare(trainer.model).state_dict(), state["model"]
    if mine.keys() != saved.keys() or any(torch.is_tensor(v) and v.shape != saved[k].shape for k, v in mine.items()):
        return "with the model as it is: the checkpoint has another"
    model = completed(saved, mine.copy)
    strategy.load(trainer.model, (), {**state, "model": model, "optimizers": ()})
    _apply_history(trainer, state)
    trainer._det_core.run.base = state["position"]["base"] + state["position"]["updates"]
    return f"with the model of run {state['position']['run']}"


def _apply_position(trainer: TrainerBase, told: Mapping[str, Any], ranks: int) -> None:
    session = trainer._det_core
    run = session.run
    size = session.strategy.num_processes
    for name in Position.__dataclass_fields__:
        setattr(run, name, told[name])
    now, before = batch_size_of(trainer._train_dataloader), told["batch_size"]
    if now is None or before is None:  # it is not known, so it is taken to be as it was
        now = before = 1
    record = told["batch"] * ranks * before
    run.batch = -(-record // (size * now))
    if (ranks, before) != (size, now):
        trainer.print(
            f"{size} rank(s) with batches of {now} go on where {ranks} with batches of {before} were: at batch "
            f"{run.batch} of epoch {run.epoch + 1}, record {run.batch * size * now}; it was record {record}"
        )
    if told["seed"] != session.seed:
        session.seed = told["seed"]
        for loader in (trainer._train_dataloader, trainer._eval_dataloader):
            reseed(loader, session.seed)


def _mine(trainer: TrainerBase, ranks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What this rank had; of another number of ranks, rank 0 takes the sums of all."""
    rank = trainer._det_core.strategy.process_index
    if len(ranks) == trainer._det_core.strategy.num_processes:
        return ranks[rank]
    sums = {
        name: [sum(each) if rank == 0 else 0 for each in zip(*(one[name] for one in ranks), strict=True)]
        for name in ("loss", "window")
    }
    return {"random": None, **sums, "norms": ranks[0]["norms"], "metrics": {}}


def _apply_history(trainer: TrainerBase, state: Mapping[str, Any]) -> None:
    history = trainer.run_history
    prefix = trainer.run_history.metric_name_prefix
    history.reset()
    history.set_metric_name_prefix("")  # the names are whole
    for name, values in state["history"].items():
        for value in values:
            history.update_metric(name, value)
    history.set_metric_name_prefix(prefix)
    history._set_epoch(state["current_epoch"])


# helpers


def python(value: Any) -> Any:
    """Numbers and arrays of numpy's, which ``weights_only`` refuses, as python's, at any depth."""
    if type(value).__module__ == "numpy":
        return to_builtin(value)
    if type(value) in (dict, Counter):  # an OrderedDict is a model's, and has attributes that would be lost
        return type(value)({python(key): python(one) for key, one in value.items()})
    return type(value)(map(python, value)) if type(value) in (list, tuple, set) else value


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
