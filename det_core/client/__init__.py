"""Steering experiments, and reading runs and checkpoints back, from Python.

Example::

    from det_core import client

    experiment = client.create_experiment("search.yaml", ".")
    experiment.wait()
    print(experiment.best_trial, experiment.metrics("validation"))

    run = client.run("latest")  # one that had no master
    print(run.state, run.metrics("validation"))
    with client.checkpoints(run="latest") as checkpoints:
        checkpoints["latest"].download("model")

Importing this package loads none of its parts; each is loaded when its name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.client._checkpoints import Checkpoint, Checkpoints, checkpoints, delete_run
    from det_core.client._experiment import Experiment
    from det_core.client._managed import connect, create_experiment, experiment, experiments, trial
    from det_core.client._master import Master
    from det_core.client._runs import Run, run, runs
    from det_core.client._trial import Trial

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Experiment",
    "Master",
    "Run",
    "Trial",
    "checkpoints",
    "connect",
    "create_experiment",
    "delete_run",
    "experiment",
    "experiments",
    "run",
    "runs",
    "trial",
]

_HOMES = {
    "Checkpoint": "_checkpoints",
    "Checkpoints": "_checkpoints",
    "Experiment": "_experiment",
    "Master": "_master",
    "Run": "_runs",
    "Trial": "_trial",
    "checkpoints": "_checkpoints",
    "connect": "_managed",
    "create_experiment": "_managed",
    "delete_run": "_checkpoints",
    "experiment": "_managed",
    "experiments": "_managed",
    "run": "_runs",
    "runs": "_runs",
    "trial": "_managed",
}
"""The module that each name stands in."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
