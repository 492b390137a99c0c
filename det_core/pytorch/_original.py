"""Read checkpoint files of trials, of det_core and of Determined, without running code in pickles."""

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
"""Paths of a trial's state, newest layout first."""
COUNTERS = ("trial_id", "batches_trained", "epochs_trained", "last_val", "last_ckpt", "step_id")
"""Counters of Determined, which rejects others."""
_SINGULAR = {
    "model_state_dict": "models_state_dict", "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}  # fmt: skip


def find_state(folder: Path) -> Path:
    """Return the path of the file with a trial's state.

    Raises:
        CheckpointError: If there is no file of a known layout.
    """
    for name in STATES:
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory")
    found = ", ".join(sorted(p.name for p in folder.iterdir()))
    raise CheckpointError(f"{folder} is not a trial's checkpoint: expected one of {', '.join(STATES)}; found {found}")


def load_weights(path: Path | IO[bytes], *, allow_pickle: bool | None = None, **torch_load_kwargs: Any) -> Any:
    """Load what ``torch.load(weights_only=True)`` accepts, and numpy arrays, as Determined's files have them.

    Args:
        path: the file.
        allow_pickle: also load pickles that run code. Defaults to ``DET_CORE_ALLOW_PICKLE``.
        torch_load_kwargs: arguments of ``torch.load``; ``map_location`` defaults to ``cpu``.

    Raises:
        CheckpointError: If loading would run other code, or the file is damaged.
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
            f"refusing to load {path}: it has more than weights, {refused(e)}, and would run code. If you trust its "
            "author, set DET_CORE_ALLOW_PICKLE=1, or pass torch_load_kwargs={'weights_only': False}"
        ) from e


def _numpy_globals() -> list[Any]:
    """Return the functions and types that pickles of numpy arrays and scalars need, also under numpy 1's names."""
    from numpy._core import multiarray

    kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdg"}
    rebuild = [getattr(multiarray, name) for name in ("_reconstruct", "scalar")]
    old = [(function, f"numpy.core.multiarray.{function.__name__}") for function in rebuild]
    return [*rebuild, *old, np.ndarray, np.dtype, *kinds, _codecs.encode]  # protocol 2 encodes text to get bytes


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, strings and containers alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def load_plain_pickle(path: Path) -> Any:
    """Load a pickle of numbers, strings and containers.

    Raises:
        CheckpointError: If it has anything else.
    """
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError) as e:
        raise CheckpointError(f"refusing to load {path}: it has more than numbers and strings: {e}") from e


def read_counters(folder: Path) -> Mapping[str, Any]:
    """Return the saved counters, and in det_core's checkpoints the position in the data."""
    saved: Any = {}
    if (path := folder / "trial_state.json").is_file():
        saved = json.loads(path.read_text())
    elif (path := folder / "trial_state.pkl").is_file() or (path := folder / "workload_sequencer.pkl").is_file():
        saved = load_plain_pickle(path)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{folder}: the trial's counters are a {type(saved).__name__}, not a dictionary")
    return {"batches_trained": saved.get("steps_completed"), **saved}  # the name in workload_sequencer.pkl


def as_current(state: Any) -> dict[str, Any]:
    """Convert a state of any layout to the current keys, with lists of models, optimizers and schedulers.

    Raises:
        CheckpointError: If it is not the state of a trial.
    """
    if not isinstance(state, dict) or not {"models_state_dict", "model_state_dict"} & state.keys():
        found = type(state).__name__
        if isinstance(state, dict):
            found = f"the keys {sorted(map(str, state))}"
        raise CheckpointError(f"invalid state of a trial: expected the key models_state_dict, found {found}")
    current = {name: value for name, value in state.items() if name not in _SINGULAR}
    for old, new in _SINGULAR.items():
        if old in state and new not in state:
            current[new] = [state[old]]
    current.setdefault("optimizers_state_dict", [])
    current.setdefault("lr_schedulers_state_dict", [])
    return current


def original_random_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Determined's four random states to the form of ``core.set_random_state()``."""
    state: dict[str, Any] = {"python": saved.get("random_rng_state", random.getstate())}
    if "np_rng_state" in saved:
        state["numpy"] = saved["np_rng_state"]
    if "cpu_rng_state" in saved:
        state["torch"] = saved["cpu_rng_state"]
    if "gpu_rng_state" in saved:
        state["cuda"] = [saved["gpu_rng_state"]]
    return state
