"""Checkpoint files of trials, ours and the original's, read without running what a pickle asks to run."""

from __future__ import annotations

import _codecs
import json
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from det_core._env import Environment
from det_core._torch_states import refused
from det_core._training.states import naming_damage
from det_core.errors import CheckpointError

STATES = ("state_dict.pth", "determined/state_dict.pth", "pedl/state_dict.pth", "checkpoint.pt")
"""Where the state of a trial is, newest layout first."""
COUNTERS = ("trial_id", "batches_trained", "epochs_trained", "last_val", "last_ckpt", "step_id")
"""Of the original, which takes no others."""
_SINGULAR = {
    "model_state_dict": "models_state_dict", "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}  # fmt: skip


def find_state(folder: Path) -> Path:
    """The file that holds a trial's state.

    Raises:
        CheckpointError: there is none of a known layout.
    """
    for name in STATES:
        if (folder / name).is_file():
            return folder / name
    there = ", ".join(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else "no folder"
    raise CheckpointError(f"{folder} is no trial's checkpoint: looked for {', '.join(STATES)}; there is {there}")


def load_weights(path: Path | IO[bytes], *, allow_pickle: bool | None = None, **torch_load_kwargs: Any) -> Any:
    """What ``torch.load(weights_only=True)`` reads, and numpy arrays besides, as the original's files have them.

    Args:
        path: the file.
        allow_pickle: also read pickles that run code. Left out: as ``DET_CORE_ALLOW_PICKLE`` says.
        torch_load_kwargs: such as ``map_location``, which is ``cpu`` if left out.

    Raises:
        CheckpointError: the file asks to run something else, or is damaged.
    """
    if allow_pickle is None:
        allow_pickle = Environment.read().allow_pickle
    kwargs = {"map_location": "cpu", **torch_load_kwargs}
    kwargs.setdefault("weights_only", not allow_pickle)
    try:
        with torch.serialization.safe_globals(_numpy_globals()), naming_damage(path):
            return torch.load(path, **kwargs)
    except pickle.UnpicklingError as e:
        raise CheckpointError(
            f"{path} holds more than weights, {refused(e)}, and was not read, since that would run code. If you trust "
            "whoever wrote it, set DET_CORE_ALLOW_PICKLE=1, or give torch_load_kwargs={'weights_only': False}"
        ) from e


def _numpy_globals() -> list[Any]:
    """What makes numpy arrays and scalars anew, which runs nothing of the pickle's; also under numpy 1's names.

    Protocol 2 writes bytes as text that is encoded again."""
    from numpy._core import multiarray

    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdg"}
    rebuild = [getattr(multiarray, name) for name in ("_reconstruct", "scalar")]
    old = [(function, f"numpy.core.multiarray.{function.__name__}") for function in rebuild]
    return [*rebuild, *old, np.ndarray, np.dtype, *kinds, _codecs.encode]


class _Nothing(pickle.Unpickler):
    """Admits numbers, strings and containers alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def load_plain_pickle(path: Path) -> Any:
    """A pickle of numbers, strings and containers.

    Raises:
        CheckpointError: it holds anything else.
    """
    try:
        with path.open("rb") as file:
            return _Nothing(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError) as e:
        raise CheckpointError(f"{path} holds more than numbers and texts, and was not read: {e}") from e


def read_counters(folder: Path) -> Mapping[str, Any]:
    """What there is of how far the trial was, and in ours of its place in the data; empty: nothing."""
    saved: Any = {}
    if (path := folder / "trial_state.json").is_file():
        saved = json.loads(path.read_text())
    elif (path := folder / "trial_state.pkl").is_file() or (path := folder / "workload_sequencer.pkl").is_file():
        saved = load_plain_pickle(path)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{folder}: the trial's counters are a {type(saved).__name__}, not a dictionary")
    return {"batches_trained": saved.get("steps_completed"), **saved}  # as the sequencer called them


def as_current(state: Any) -> dict[str, Any]:
    """A state of any layout with the keys of today's: lists of models, optimizers and schedulers.

    Raises:
        CheckpointError: it is no state of a trial.
    """
    if not isinstance(state, dict) or not {"models_state_dict", "model_state_dict"} & state.keys():
        found = f"the keys {sorted(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise CheckpointError(f"the checkpoint holds {found}: expected models_state_dict among them")
    current = {name: value for name, value in state.items() if name not in _SINGULAR}
    for old, new in _SINGULAR.items():
        if old in state and new not in state:
            current[new] = [state[old]]
    current.setdefault("optimizers_state_dict", [])
    current.setdefault("lr_schedulers_state_dict", [])
    return current


def original_random_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The original's four random states as ``core.set_random_state()`` takes them."""
    state: dict[str, Any] = {"python": saved.get("random_rng_state", random.getstate())}
    if "np_rng_state" in saved:
        state["numpy"] = saved["np_rng_state"]
    if "cpu_rng_state" in saved:
        state["torch"] = saved["cpu_rng_state"]
    if "gpu_rng_state" in saved:
        state["cuda"] = [saved["gpu_rng_state"]]
    return state
