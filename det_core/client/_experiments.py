"""Experiments of a master and their trials: created, waited for, steered and read back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from det_core._env import Environment
from det_core._json import str_to_nonfinite
from det_core.client._master import TERMINAL, Master, list_rows, reach
from det_core.client._table import spread, to_frame
from det_core.errors import CheckpointError, CheckpointNotFound, ExperimentInvalid, MasterError, MasterUnreachable
from det_core.protocol.records import ExperimentView, MetricView, TrialView
from det_core.protocol.wire import decode, from_wire

if TYPE_CHECKING:
    from typing_extensions import Self

    from det_core.client._checkpoints import Checkpoint

V = TypeVar("V", ExperimentView, TrialView)
WAIT_TIMEOUT = 30.0
"""Longest time that one request for the end of an experiment may last, in seconds."""
TRIALS_AT_A_TIME = 100
"""Trials whose metrics one request asks for: their IDs are in its URL."""


def connect(master: str | None = None, token: str | None = None, home: Path | str | None = None) -> Master:
    """Return a session with a master.

    Args:
        master: Its address. Defaults to ``DET_MASTER``; without that, to the embedded one of the home directory, which
            is started if it does not run.
        token: Token of the user. Defaults to ``DET_USER_TOKEN``, or the one in the home directory.
        home: Home directory. Defaults to ``DET_CORE_HOME``, else the platform's user data directory.

    Raises:
        ValueError: If the address is invalid.
        MasterUnreachable: If the embedded master cannot be started.
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
    """Create an experiment, which starts at once.

    Args:
        config: Path of its configuration (YAML or JSON), or a mapping.
        context: Directory that each trial runs in a copy of. Defaults to an empty one.
        overrides: Changes of the configuration, as ``"searcher.max_trials=8"``.
        activate: Whether it starts at once; else it is paused.
        master: Session, or an address. Defaults to that of :func:`connect`.

    Raises:
        ExperimentInvalid: If the configuration has mistakes, all of them in ``problems``.
        ValueError: If the directory does not exist, or is too large.
    """
    home = Environment.read().home
    return create(_session(master), config, context, overrides=overrides, activate=activate, home=home)[0]


def experiments(master: Master | str | None = None) -> list[Experiment]:
    """Return all experiments of a master, newest first; see :func:`create_experiment`."""
    session = _session(master)
    rows = list_rows(session, "experiments", sortBy="SORT_BY_ID", orderBy="ORDER_BY_DESC")
    return [Experiment(session, row) for row in rows]


def experiment(experiment_id: int, master: Master | str | None = None) -> Experiment:
    """Return one experiment.

    Raises:
        UnknownToMaster: If the master has none of this ID.
    """
    session = _session(master)
    return Experiment(session, session.get(f"experiments/{int(experiment_id)}")["experiment"])


def trial(trial_id: int, master: Master | str | None = None) -> Trial:
    """Return one trial.

    Raises:
        UnknownToMaster: If the master has none of this ID.
    """
    session = _session(master)
    return Trial(session, session.get(f"trials/{int(trial_id)}")["trial"])


class _Shown(Generic[V]):
    """An experiment or a trial as of its last :meth:`refresh`."""

    _kind: type[V]
    _name: str
    _place: str
    """Key of a log line with the place behind it."""

    def __init__(self, master: Master, value: Mapping[str, Any]) -> None:
        self.master = master
        self._update(value)

    def _update(self, value: Mapping[str, Any]) -> None:
        self.info: dict[str, Any] = from_wire(value)
        self.record: V = decode(self._kind, value)
        self.id: int = self.record.id

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.record.state in TERMINAL

    @property
    def error(self) -> str | None:
        """Why its last run failed; of an experiment why it ended in ERROR."""
        return self.record.error or None

    def refresh(self) -> Self:
        """Ask for its present state; return the object."""
        self._update(self.master.get(self._path())[self._name])
        return self

    def _do(self, action: str) -> None:
        self.master.post(self._path(action))
        self.refresh()

    def _path(self, *more: str) -> str:
        return "/".join([f"{self._name}s", str(self.id), *more])

    def kill(self) -> None:
        """Kill it for good; the search of a trial goes on without it."""
        self._do("kill")

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return its checkpoints, newest first, those deleted since included: see ``state``."""
        return list(map(from_wire, list_rows(self.master, self._path("checkpoints"))))

    def logs(
        self,
        *,
        after: str = "",
        follow: bool = False,
        tail: int | None = None,
        level: str | None = None,
        rank: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield its log lines; those of an experiment's trials in the order of their times.

        A line has ``trial_id``, ``timestamp`` in seconds, ``level``, ``rank_id``, ``stdtype`` and ``log``.

        Args:
            after: ``id`` of a line of a trial: only newer ones; for an experiment the ``cursor`` that some lines have,
                the last one always.
            follow: Whether to wait for more until it has ended.
            tail: Only the last of the lines so far, and with ``follow`` those that come.
            level: Lowest level: ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``CRITICAL``.
            rank: Only lines of this rank.
        """
        query: dict[str, Any] = {"follow": follow, "level": level, "rank": rank, "tail": tail}
        while True:
            part = []
            try:
                with self.master.lines(self._path("logs"), {**query, "after": after}) as lines:
                    for line in map(from_wire, lines):
                        part.append(line)
                        # Only whole parts: behind another line of an experiment a stream cannot be resumed.
                        if place := line.get(self._place):
                            after = place
                            query["tail"] = None
                            yield from part
                            part = []
            except MasterUnreachable:
                # A stream that is followed breaks when the master is restarted or nothing is printed for a minute.
                if not follow:
                    raise
            # Asked anew: a stream also ends when the server stops, and the trial may go on.
            if not follow or self.refresh().ended:
                return


class Experiment(_Shown[ExperimentView]):
    """An experiment, as it was when it was last asked for; :meth:`refresh` asks anew.

    Attributes:
        id: Number.
        master: Session with its master.
        record: The master's record of it.
        info: The same as a dictionary, with what this version does not know.
    """

    _kind = ExperimentView
    _name = "experiment"
    _place = "cursor"

    def __repr__(self) -> str:
        return f"Experiment({self.id}, name={self.name!r}, state={self.state!r})"

    @property
    def name(self) -> str:
        """Name, from its configuration."""
        return self.record.name

    @property
    def state(self) -> str:
        """``ACTIVE``, ``PAUSED``, ``STOPPING_…``, ``COMPLETED``, ``CANCELED`` or ``ERROR``."""
        return self.record.state

    @property
    def progress(self) -> float:
        """Fraction of the search that is done."""
        return self.record.progress

    @property
    def config(self) -> dict[str, Any]:
        """Complete configuration, defaults included."""
        return dict(self.record.config)

    @property
    def metric(self) -> str:
        """Name of the metric that is searched for."""
        return self.record.searcher_metric

    @property
    def smaller_is_better(self) -> bool:
        """Whether the best value of :attr:`metric` is the smallest."""
        return self.record.smaller_is_better

    @property
    def best_metric(self) -> float | None:
        """The best value of :attr:`metric`, as of the last :meth:`refresh`."""
        return self.record.best_metric

    @property
    def best_trial(self) -> Trial | None:
        """The trial with the best value of :attr:`metric`, as of now; None before the first value."""
        best = self.refresh().record.best_trial_id
        return trial(best, self.master) if best else None

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended, and return its state.

        Args:
            timeout: Maximum wait in seconds; None waits for any time. A paused experiment is waited for, too.

        Raises:
            TimeoutError: If it has not ended by then.
        """
        deadline = float("inf")
        if timeout is not None:
            deadline = time.monotonic() + timeout
        while True:
            # Proxies end a request that is silent for a minute.
            wait = max(min(deadline - time.monotonic(), WAIT_TIMEOUT), 0.0)
            self._update(self.master.get(self._path("wait"), wait=wait, timeout_seconds=wait)["experiment"])
            if self.ended:
                return self.state
            if time.monotonic() >= deadline:
                raise TimeoutError(f"experiment {self.id} is still {self.state} after {timeout:g} s")

    def trials(self, *, best_first: bool = False) -> list[Trial]:
        """Return its trials, in the order in which they were created, or by their best :attr:`metric`."""
        order = "SORT_BY_BEST_VALIDATION_METRIC" if best_first else None
        return [Trial(self.master, row) for row in list_rows(self.master, self._path("trials"), sortBy=order)]

    def trial_ids(self) -> list[int]:
        """Return the IDs of its trials."""
        return [trial.id for trial in self.trials()]

    def metrics(self, group: str | None = None) -> Any:
        """Return the metrics of all its trials as a table, a row for each step of a trial.

        Args:
            group: Metric group, such as ``"validation"``. Defaults to all.

        Returns:
            A pandas DataFrame if pandas is installed, else a list of dicts; nested metrics have dots in their names.
        """
        return _metrics_table(self.master, self.trial_ids(), group)

    def search(self) -> dict[str, Any]:
        """Return the state of its search: rungs and brackets, and the number of its events."""
        return from_wire(self.master.get(self._path("search"))["search"])

    def best_checkpoint(self) -> dict[str, Any] | None:
        """Return the checkpoint with the best value of :attr:`metric` of those that still exist, else the newest."""
        best = self.master.get(self._path("best_checkpoint")).get("checkpoint")
        if best is not None:
            return from_wire(best)
        return next((c for c in self.checkpoints() if c["state"] == "COMPLETED"), None)

    def download_checkpoint(self, folder: Path | str, storage_id: str | None = None) -> Path:
        """Copy a checkpoint into a directory, and compare it with its manifest.

        Args:
            folder: Directory, made if need be.
            storage_id: ID of one of its :meth:`checkpoints`, or the beginning of one. Defaults to the best.

        Returns:
            The directory.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointCorrupt: If a file differs from the manifest.
            StorageError: If its storage cannot be read from here.
        """
        with self.open_checkpoint(storage_id) as checkpoint:
            checkpoint.download(folder)
        return Path(folder)

    def open_checkpoint(self, storage_id: str | None = None) -> AbstractContextManager[Checkpoint]:
        """Return a context with one of its checkpoints in its storage; see :meth:`download_checkpoint`."""
        # Here, as is the journal below: to import storage takes as long as a command that lists experiments.
        from det_core.client._checkpoints import open_checkpoint

        checkpoint = self._choose_checkpoint(storage_id)
        settings = checkpoint.get("storage") or self.config.get("checkpoint_storage")
        if not settings:
            raise CheckpointError(f"experiment {self.id} names no checkpoint_storage")
        return open_checkpoint(settings, str(checkpoint["uuid"]), f"experiment {self.id}")

    def pause(self) -> None:
        """Have its trials save and stop, to resume at :meth:`activate`."""
        self._do("pause")

    def activate(self) -> None:
        """Resume it after :meth:`pause`."""
        self._do("activate")

    def cancel(self) -> None:
        """Have its trials save and stop for good."""
        self._do("cancel")

    def delete(self) -> None:
        """Delete it, with its checkpoints, metrics, TensorBoard files and logs. It must have ended."""
        self.master.request("DELETE", self._path())

    def go_on(self, overrides: Sequence[str] = ()) -> Experiment:
        """Continue it after its end: trials that are incomplete resume from their latest checkpoints.

        Args:
            overrides: Another length for a single trial, as ``"searcher.max_length=100"``.

        Returns:
            The experiment, in its new state.

        Raises:
            ConfigError: If a change cannot be read.
            MasterError: If it has not ended, or its search is complete.
        """
        from det_core.config import read_overrides

        changes = ""
        if overrides:
            changes = orjson.dumps(read_overrides(overrides)).decode()
        body = {"id": self.id, "overrideConfig": changes}
        # Once: a second request would meet an experiment that runs, and look refused.
        self._update(self.master.post("experiments/continue", body, once=True)["experiment"])
        return self

    def _choose_checkpoint(self, storage_id: str | None) -> dict[str, Any]:
        if storage_id is None:
            best = self.best_checkpoint()
            if best is None:
                raise CheckpointNotFound(f"experiment {self.id} has no checkpoint")
            return best
        from det_core.journal import ambiguous_id, match_id

        by_id = {str(c["uuid"]): c for c in self.checkpoints() if c["state"] != "DELETED"}
        matches = match_id(storage_id, by_id)
        if not matches:
            raise CheckpointNotFound(f"experiment {self.id} has no checkpoint {storage_id!r}")
        if len(matches) > 1:
            raise CheckpointNotFound(ambiguous_id(storage_id, matches, f"checkpoints of experiment {self.id}"))
        return by_id[matches[0]]


class Trial(_Shown[TrialView]):
    """A trial, as it was when it was last asked for; :meth:`refresh` asks anew.

    Attributes:
        id: Number.
        experiment_id: Number of its experiment.
        master: Session with its master.
        record: The master's record of it.
        info: The same as a dictionary, with what this version does not know.
    """

    _kind = TrialView
    _name = "trial"
    _place = "id"

    def __init__(self, master: Master, value: Mapping[str, Any]) -> None:
        super().__init__(master, value)
        self.experiment_id = self.record.experiment_id

    def __repr__(self) -> str:
        return f"Trial({self.id}, experiment_id={self.experiment_id}, state={self.state!r})"

    @property
    def state(self) -> str:
        """``QUEUED``, ``STARTING``, ``RUNNING``, ``ACTIVE`` (waiting for the search), ``PAUSED``, ``COMPLETED``, …"""
        return self.record.state

    @property
    def hparams(self) -> dict[str, Any]:
        """Hyperparameters."""
        return dict(self.record.hparams)

    @property
    def restarts(self) -> int:
        """Number of times that it was started again after a failure."""
        return self.record.restarted or 0  # `restarts` on the wire counts one too many at the end

    @property
    def steps_completed(self) -> int:
        """Last step that it has reported."""
        return self.record.total_batches

    @property
    def latest_checkpoint(self) -> str | None:
        """Storage ID of the checkpoint from which it would resume."""
        return self.record.latest_checkpoint or None

    @property
    def exit_status(self) -> int | None:
        """Exit status of its last run: 128 and the number of the signal if one ended it; None if not known."""
        return self.record.exit_status

    @property
    def latest_validation(self) -> dict[str, Any] | None:
        """Metrics of its last validation."""
        return _validation(self.info.get("latest_validation"))

    @property
    def best_validation(self) -> dict[str, Any] | None:
        """Metrics of its best validation, by the metric that is searched for."""
        return _validation(self.info.get("best_validation"))

    @property
    def best_metric(self) -> float | None:
        """The best value of the metric that is searched for."""
        best = self.record.best_validation
        return None if best is None else best.metric

    def metrics(self, group: str | None = None) -> Any:
        """Return its metrics as a table; see :meth:`Experiment.metrics`."""
        return _metrics_table(self.master, [self.id], group)


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
    """Create an experiment as :func:`create_experiment` does; return it with the master's warnings.

    Args:
        validate_only: Whether only to check if it could be created; its ID is then 0.
        home: Home directory, which is never part of a context.
    """
    from det_core.client._pack import pack  # not for those who only look

    packed = None
    if context is not None:
        packed = pack(Path(context), home)
    body = {
        "config": _read(config),
        "b64Tgz": packed,
        "activate": activate,
        "validateOnly": validate_only,
        "overrides": list(overrides),
    }
    try:
        # Once: a second request could create a second experiment.
        answer = master.post("experiments", body, once=True)
    except MasterError as e:
        if e.status != 400:
            raise
        raise ExperimentInvalid([line for line in str(e).splitlines() if line.strip()]) from e
    return Experiment(master, answer["experiment"]), list(answer.get("configWarnings") or ())


def metric_rows(master: Master, trials: Sequence[int], group: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of trials' metrics, in the order of trials, groups and steps."""
    for start in range(0, len(trials), TRIALS_AT_A_TIME):
        query = {"trialIds": list(trials[start : start + TRIALS_AT_A_TIME]), "group": group}
        with master.lines("trials/metrics/trial_metrics", query) as pages:
            for row in (decode(MetricView, value) for page in pages for value in page["metrics"]):
                if not row.archived:
                    yield {
                        "trial_id": row.trial_id,
                        "group": row.group,
                        "steps_completed": row.total_batches,
                        "time": row.end_time,
                        "trial_run_id": row.trial_run_id,
                        "metrics": row.metrics,
                    }


def _session(master: Master | str | None) -> Master:
    if isinstance(master, Master):
        return master
    return connect(master)


def _read(config: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    """Return the text of a configuration."""
    if isinstance(config, Mapping):
        return orjson.dumps(dict(config)).decode()
    path = Path(config)
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ValueError(f"file not found: {path}") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ValueError(f"{path} is not text: name the experiment's configuration, a YAML or JSON file") from None


def _metrics_table(master: Master, trials: Sequence[int], group: str | None) -> Any:
    table = []
    for row in metric_rows(master, trials, group):
        metrics = spread(row.pop("metrics"))
        # A metric with the name of a column must not replace it.
        table.append(row | {f"metrics.{k}" if k in row else k: v for k, v in metrics.items()})
    return to_frame(table)


def _validation(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not value:
        return None
    row = from_wire(value)
    return {**row, "metrics": str_to_nonfinite((row.get("metrics") or {}).get("avgMetrics") or {})}
