"""A trained trial for inference, from the files of its checkpoint."""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from det_core import core
from det_core._training.states import completed
from det_core._training.strategy import OneProcess, fitting
from det_core.errors import CheckpointError
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._original import as_current, find_state, load_weights
from det_core.pytorch._trial import PyTorchTrial

logger = logging.getLogger("det_core.pytorch")
_FROM = "__det_core_checkpoint_code__"
"""An attribute of modules that were imported from a checkpoint's code: its folder."""


class _AsTheyAre(OneProcess):
    """Models stay where they were built."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


class CheckpointLoadContext(PyTorchTrialContext):
    """The context of a trial that is loaded for inference: one process, nothing moved, wraps only register.

    Args:
        hparams: for ``get_hparam()``.
        exp_conf: for ``get_experiment_config()``.
    """

    def __init__(self, hparams: Mapping[str, Any] | None = None, exp_conf: Mapping[str, Any] | None = None) -> None:
        alone = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        nothing: Any = SimpleNamespace(
            distributed=alone, profiler=None, managed=False, trial=None, latest_checkpoint=None, steps_completed=0
        )
        super().__init__(
            nothing, _AsTheyAre(torch.device("cpu")), hparams=hparams, exp_conf=exp_conf,
            enable_tensorboard_logging=False,
        )  # fmt: skip
        self._updates = True
        self._scratch: Path | None = None

    def get_tensorboard_path(self) -> Path:
        """A folder that goes with this process: nothing that is written for TensorBoard here is kept."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="det_core-tensorboard-"))
            atexit.register(shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch


def load_trial_from_checkpoint_path(
    path: str | Path,
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: Mapping[str, Any] | None = None,
    torch_load_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PyTorchTrial:
    """A trial with the models of a checkpoint, ours or the original's.

    Args:
        path: the checkpoint's folder, as ``det-core checkpoint download`` makes it.
        trial_class: the class. Left out: it is imported by the name in the checkpoint, from the code in it.
        trial_kwargs: given to the class after the context.
        torch_load_kwargs: given to ``torch.load``, such as ``map_location``.
        kwargs: the same, deprecated.

    Raises:
        AssertionError: no ``load_data.json`` or ``metadata.json``: this is no trial's checkpoint.
        ValueError: the class cannot be imported: give ``trial_class``.
        CheckpointError: the folder holds no models of a known layout.
    """
    folder = Path(path).resolve()
    if kwargs:
        if torch_load_kwargs is not None:
            raise ValueError(f"give {', '.join(kwargs)} in torch_load_kwargs")
        logger.warning("load_trial_from_checkpoint_path(%s=…) is deprecated: use torch_load_kwargs", next(iter(kwargs)))
        torch_load_kwargs = kwargs
    told = _load_data(folder)
    if told.get("trial_type", "PyTorchTrial") != "PyTorchTrial":
        logger.warning("%s is the checkpoint of a %s, not of a PyTorchTrial", folder, told["trial_type"])
    config, hparams = told.get("experiment_config"), told.get("hparams")
    context = CheckpointLoadContext(hparams, config)
    with nullcontext() if trial_class is not None else _importing_from(folder / "code"):
        cls = trial_class or _imported(folder, told)
        trial = cls(context, **dict(trial_kwargs or {}))
    state = as_current(load_weights(find_state(folder), **{"map_location": "cpu", **dict(torch_load_kwargs or {})}))
    saved = state.get("models_state_dict", [])
    if len(saved) != len(context.models):
        raise CheckpointError(f"{folder} holds {len(saved)} model(s), and {cls.__name__} wraps {len(context.models)}")
    saved = completed(saved, lambda: context._strategy.state(context.models, [])["models_state_dict"])
    with fitting(folder):
        context._strategy.load(context.models, [], {"models_state_dict": saved, "optimizers_state_dict": []})
    return trial


def _load_data(folder: Path) -> dict[str, Any]:
    for name in ("load_data.json", "metadata.json"):
        if (folder / name).exists():
            told = json.loads((folder / name).read_text())
            return told if isinstance(told, dict) else {}
    raise AssertionError(f"{folder} holds neither load_data.json nor metadata.json: is it a trial's checkpoint?")


def _imported(folder: Path, told: Mapping[str, Any]) -> type[PyTorchTrial]:
    """The class that the checkpoint names, from its own code."""
    config = told.get("experiment_config") or {}
    spec = told.get("trial_cls_spec") or config.get("entrypoint")
    if not isinstance(spec, str) or ":" not in spec:
        raise ValueError(f"{folder} does not say which class it is of: give trial_class=")
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        origin = str(getattr(found, "__file__", None))
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{spec} cannot be imported from {folder / 'code'} ({e}): give trial_class=") from e
    if not (isinstance(found, type) and issubclass(found, PyTorchTrial)):
        raise ValueError(f"{spec} is no PyTorchTrial: give trial_class=")
    if not origin.startswith(str(folder / "code")):
        logger.warning("%s is not from the checkpoint's code, but from %s, which was imported before", spec, origin)
    return found


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Import from a checkpoint's code, and not what was imported from that of another before."""
    for name, module in list(sys.modules.items()):
        if getattr(module, _FROM, folder) != folder:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in list(sys.modules.values()):
            if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
                setattr(module, _FROM, folder)
