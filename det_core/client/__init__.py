"""Python client: create and steer experiments, read runs and checkpoints back.

Example::

    from det_core import client

    experiment = client.create_experiment("search.yaml", ".")
    experiment.wait()
    print(experiment.best_trial, experiment.metrics("validation"))

    run = client.run("latest")  # of a script that had no master
    print(run.state, run.metrics("validation"))
    with client.checkpoints(run="latest") as checkpoints:
        checkpoints["latest"].download("model")

Importing this package imports none of its modules: each is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.client._checkpoints import Checkpoint, Checkpoints, checkpoints, delete_run
    from det_core.client._experiments import (
        Experiment,
        Trial,
        connect,
        create_experiment,
        experiment,
        experiments,
        trial,
    )
    from det_core.client._master import Master
    from det_core.client._runs import Run, run, runs

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

_LAZY_EXPORTS = {
    "Checkpoint": "_checkpoints",
    "Checkpoints": "_checkpoints",
    "Experiment": "_experiments",
    "Master": "_master",
    "Run": "_runs",
    "Trial": "_experiments",
    "checkpoints": "_checkpoints",
    "connect": "_experiments",
    "create_experiment": "_experiments",
    "delete_run": "_checkpoints",
    "experiment": "_experiments",
    "experiments": "_experiments",
    "run": "_runs",
    "runs": "_runs",
    "trial": "_experiments",
}
"""Name to module."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
