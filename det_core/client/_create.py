"""Creating an experiment: the configuration and the context, as they are sent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from det_core.client._experiment import Experiment
from det_core.client._master import Master
from det_core.client._pack import pack
from det_core.errors import ExperimentInvalid, MasterError


def create(
    master: Master,
    config: Mapping[str, Any] | str | os.PathLike[str],
    context: str | os.PathLike[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    activate: bool = True,
    validate_only: bool = False,
    home: Path | None = None,
) -> tuple[Experiment, list[str]]:
    """Create an experiment; returns it with the master's warnings.

    Args:
        master: who is to run it.
        config: the path of its configuration (YAML or JSON), or a mapping.
        context: the folder that the trials run in a copy of; None: an empty one.
        overrides: changes of the configuration, as ``"searcher.max_trials=8"``.
        activate: whether it starts at once; else it is paused.
        validate_only: only look whether it could be created; its id is then 0.
        home: what is never part of a context.

    Raises:
        ExperimentInvalid: mistakes in the configuration, all of them in ``problems``.
        ValueError: there is no such folder, or it is too large.
        OSError: a file cannot be read.
        MasterError: the master refused it for another reason.
    """
    body = {
        "config": _text(config),
        "b64Tgz": None if context is None else pack(Path(context), home),
        "activate": activate,
        "validateOnly": validate_only,
        "overrides": list(overrides),
    }
    try:
        told = master.post("experiments", body, once=True)
    except MasterError as e:
        if e.status != 400:
            raise
        raise ExperimentInvalid([line for line in str(e).splitlines() if line.strip()]) from e
    return Experiment(master, told["experiment"]), list(told.get("configWarnings") or ())


def _text(config: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    if isinstance(config, Mapping):
        return orjson.dumps(dict(config)).decode()
    path = Path(config)
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name the experiment's configuration, a YAML or JSON file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: name the experiment's configuration, a YAML or JSON file") from None
