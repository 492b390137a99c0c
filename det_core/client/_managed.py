"""Experiments of a master: the functions that ``det_core.client`` offers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core._env import Environment
from det_core.client._address import reach
from det_core.client._create import create
from det_core.client._experiment import Experiment
from det_core.client._master import Master, list_rows
from det_core.client._trial import Trial


def connect(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Master:
    """A session with a master.

    Args:
        master: its address. None: ``DET_MASTER``; without that, the embedded one of the home folder, which is started
            if it does not run.
        token: the user's token. None: ``DET_USER_TOKEN``, or the one in the home folder.
        home: the home folder; None: ``DET_CORE_HOME``, else the platform's user data folder.

    Raises:
        ValueError: the address is none.
        MasterUnreachable: the embedded master cannot be started.
    """
    return Master(reach(master, token, home))


def create_experiment(
    config: Mapping[str, Any] | str | os.PathLike[str],
    context: str | os.PathLike[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    activate: bool = True,
    master: Master | str | None = None,
) -> Experiment:
    """Create an experiment, which begins to run.

    Args:
        config: the path of its configuration (YAML or JSON), or a mapping.
        context: the folder that each trial runs in a copy of; None: an empty one.
        overrides: changes of the configuration, as ``"searcher.max_trials=8"``.
        activate: whether it starts at once; else it is paused.
        master: a session, or an address; None: as for :func:`connect`.

    Raises:
        ExperimentInvalid: mistakes in the configuration, all of them in ``problems``.
        ValueError: there is no such folder, or it is too large.
    """
    home = Environment.read().home
    return create(_session(master), config, context, overrides=overrides, activate=activate, home=home)[0]


def experiments(master: Master | str | None = None) -> list[Experiment]:
    """All experiments of a master, newest first; see :func:`create_experiment`."""
    session = _session(master)
    rows = list_rows(session, "experiments", sortBy="SORT_BY_ID", orderBy="ORDER_BY_DESC")
    return [Experiment(session, row) for row in rows]


def experiment(experiment_id: int, master: Master | str | None = None) -> Experiment:
    """One experiment.

    Raises:
        UnknownToMaster: the master has none of that id.
    """
    session = _session(master)
    return Experiment(session, session.get(f"experiments/{int(experiment_id)}")["experiment"])


def trial(trial_id: int, master: Master | str | None = None) -> Trial:
    """One trial.

    Raises:
        UnknownToMaster: the master has none of that id.
    """
    session = _session(master)
    return Trial(session, session.get(f"trials/{int(trial_id)}")["trial"])


def _session(master: Master | str | None) -> Master:
    return master if isinstance(master, Master) else connect(master)
