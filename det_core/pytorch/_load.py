"""Load a trained trial for inference from the files of its checkpoint."""

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
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
"""Attribute of modules imported from the code of a checkpoint: its directory."""


class _NoPlacement(OneProcess):
    """Strategy that leaves models on their device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


class CheckpointLoadContext(PyTorchTrialContext):
    """Context of a trial loaded for inference: one process, and wraps that only register.

    Args:
        hparams: values for ``get_hparam()``.
        exp_conf: value of ``get_experiment_config()``.
    """

    def __init__(self, hparams: Mapping[str, Any] | None = None, exp_conf: Mapping[str, Any] | None = None) -> None:
        alone = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        nothing: Any = SimpleNamespace(
            distributed=alone, profiler=None, managed=False, trial=None, latest_checkpoint=None, steps_completed=0
        )
        super().__init__(
            nothing, _NoPlacement(torch.device("cpu")), hparams=hparams, exp_conf=exp_conf,
            enable_tensorboard_logging=False,
        )  # fmt: skip
        self._updates = True
        self._scratch: Path | None = None

    def get_tensorboard_path(self) -> Path:
        """Return a temporary directory, deleted when this process exits."""
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
    """Build a trial and load the models of a checkpoint of det_core or Determined.

    Args:
        path: directory of the checkpoint, as ``det-core checkpoint download`` writes it.
        trial_class: class of the trial. Defaults to the class that the checkpoint names, imported from its code.
        trial_kwargs: arguments of the class after the context.
        torch_load_kwargs: arguments of ``torch.load``, such as ``map_location``.
        kwargs: deprecated form of ``torch_load_kwargs``.

    Raises:
        AssertionError: If the directory has no ``load_data.json`` or ``metadata.json``.
        ValueError: If the class cannot be imported; pass ``trial_class``.
        CheckpointError: If no models of a known layout are found.
    """
    folder = Path(path).resolve()
    if kwargs:
        if torch_load_kwargs is not None:
            raise ValueError(f"pass {', '.join(kwargs)} in torch_load_kwargs")
        logger.warning("load_trial_from_checkpoint_path(%s=…) is deprecated: use torch_load_kwargs", next(iter(kwargs)))
        torch_load_kwargs = kwargs
    origin = _load_data(folder)
    if origin.get("trial_type", "PyTorchTrial") != "PyTorchTrial":
        logger.warning("%s is the checkpoint of a %s, not of a PyTorchTrial", folder, origin["trial_type"])
    config = origin.get("experiment_config")
    hparams = origin.get("hparams")
    context = CheckpointLoadContext(hparams, config)
    importing: AbstractContextManager[None] = nullcontext()
    if trial_class is None:
        importing = _importing_from(folder / "code")
    with importing:
        cls = trial_class or _import_class(folder, origin)
        trial = cls(context, **dict(trial_kwargs or {}))  # may import more of the code
    state = as_current(load_weights(find_state(folder), **{"map_location": "cpu", **dict(torch_load_kwargs or {})}))
    saved = state.get("models_state_dict", [])
    if len(saved) != len(context.models):
        raise CheckpointError(f"{folder} has {len(saved)} model(s), but {cls.__name__} wraps {len(context.models)}")
    saved = completed(saved, lambda: context._strategy.state(context.models, [])["models_state_dict"])
    # Without optimizers: a trial for inference may wrap others.
    with fitting(folder):
        context._strategy.load(context.models, [], {"models_state_dict": saved, "optimizers_state_dict": []})
    return trial


def _load_data(folder: Path) -> dict[str, Any]:
    for name in ("load_data.json", "metadata.json"):
        if (folder / name).exists():
            origin = json.loads((folder / name).read_text())
            if isinstance(origin, dict):
                return origin
            return {}
    raise AssertionError(f"{folder} is not a trial's checkpoint: it has neither load_data.json nor metadata.json")


def _import_class(folder: Path, origin: Mapping[str, Any]) -> type[PyTorchTrial]:
    """Import the class that the checkpoint names from its code."""
    config = origin.get("experiment_config") or {}
    spec = origin.get("trial_cls_spec") or config.get("entrypoint")
    if not isinstance(spec, str) or ":" not in spec:
        raise ValueError(f"{folder} does not name the class of its trial: pass trial_class=")
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        file = str(getattr(found, "__file__", None))
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"cannot import {spec} from {folder / 'code'} ({e}): pass trial_class=") from e
    if not (isinstance(found, type) and issubclass(found, PyTorchTrial)):
        raise ValueError(f"{spec} is not a PyTorchTrial: pass trial_class=")
    if not file.startswith(str(folder / "code")):
        logger.warning("%s is from %s, which was imported before, and not from the checkpoint's code", spec, file)
    return found


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Import from the code of a checkpoint."""
    # Modules of the same name may be there from the code of another checkpoint.
    for name, module in list(sys.modules.items()):
        if getattr(module, _FROM, folder) != folder:
            del sys.modules[name]  # else the import would find it
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in list(sys.modules.values()):
            if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
                setattr(module, _FROM, folder)
