"""An experiment of a master, as Python sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from det_core._json import str_to_nonfinite
from det_core.client._master import TERMINAL, Master, list_rows
from det_core.client._trial import Trial, trial_metrics
from det_core.protocol.wire import from_wire

LONGEST_WAIT = 30.0
"""Seconds that one question for the end of an experiment may last."""


class Experiment:
    """An experiment, as it was when it was last asked for; :meth:`refresh` asks anew.

    Attributes:
        id: its number.
    """

    def __init__(self, master: Master, told: Mapping[str, Any]) -> None:
        self._master = master
        self._view = from_wire(told)
        self.id = int(self._view["id"])

    def __repr__(self) -> str:
        return f"Experiment({self.id}, name={self.name!r}, state={self.state!r})"

    @property
    def master(self) -> Master:
        """The session with its master."""
        return self._master

    @property
    def info(self) -> dict[str, Any]:
        """All that the master says of it."""
        return self._view

    @property
    def name(self) -> str:
        """Its name, from its configuration."""
        return str(self._view.get("name", ""))

    @property
    def state(self) -> str:
        """``ACTIVE``, ``PAUSED``, ``STOPPING_…``, ``COMPLETED``, ``CANCELED`` or ``ERROR``."""
        return str(self._view["state"])

    @property
    def ended(self) -> bool:
        """Whether nothing happens in it any more."""
        return self.state in TERMINAL

    @property
    def progress(self) -> float:
        """How much of the search is done, from 0 to 1."""
        return float(self._view.get("progress") or 0.0)

    @property
    def error(self) -> str | None:
        """Why it ended in ERROR."""
        return self._view.get("error") or None

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, complete: what was left out has its default."""
        return dict(self._view["config"])

    @property
    def metric(self) -> str:
        """The name of the metric that is searched for."""
        return str(self._view.get("searcher_metric", ""))

    @property
    def smaller_is_better(self) -> bool:
        """Whether the best value of :attr:`metric` is the smallest."""
        return bool(self._view.get("smaller_is_better", True))

    def refresh(self) -> Experiment:
        """Ask for its present state; returns itself."""
        self._view = from_wire(self._master.get(self._path())["experiment"])
        return self

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it has ended, and return its state.

        Args:
            timeout: seconds to wait at most; None: any number. A paused experiment is waited for, too.

        Raises:
            TimeoutError: it has not ended by then.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            wait = max(min(until - time.monotonic(), LONGEST_WAIT), 0.0)
            told = self._master.get(self._path("wait"), wait=wait, timeout_seconds=wait)
            self._view = from_wire(told["experiment"])
            if self.ended:
                return self.state
            if time.monotonic() >= until:
                raise TimeoutError(f"experiment {self.id} is still {self.state} after {timeout:g} s")

    def trials(self) -> list[Trial]:
        """Its trials, in the order in which they were made."""
        return [Trial(self._master, told) for told in list_rows(self._master, self._path("trials"))]

    def trial_ids(self) -> list[int]:
        """The ids of its trials."""
        return [trial.id for trial in self.trials()]

    @property
    def best_trial(self) -> Trial | None:
        """The trial with the best value of :attr:`metric`; None: there is no value yet."""
        best = self.refresh().info.get("best_trial_id")
        if not best:
            return None
        return Trial(self._master, self._master.get(f"trials/{int(best)}")["trial"])

    @property
    def best_metric(self) -> float | None:
        """The best value of :attr:`metric`, as of the last :meth:`refresh`."""
        best = self._view.get("best_trial_searcher_metric")
        return None if best is None else float(str_to_nonfinite(best))

    def metrics(self, group: str | None = None) -> Any:
        """The metrics of all its trials as a table, a row for each step of a trial.

        Args:
            group: one metric group, such as ``"validation"``; None: all of them.

        Returns:
            A pandas DataFrame where pandas is installed, else a list of dicts; nested metrics have dots in their names.
        """
        return trial_metrics(self._master, self.trial_ids(), group)

    def search(self) -> dict[str, Any]:
        """Where its search stands: rungs and brackets, and what has happened so far."""
        return from_wire(self._master.get(self._path("search"))["search"])

    def logs(self, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """The log lines of all its trials so far, trial by trial; see :meth:`Trial.logs`."""
        for trial in self.trials():
            yield from trial.logs(after=after)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Its checkpoints, newest first, those deleted since included: see ``state``."""
        return list(map(from_wire, list_rows(self._master, self._path("checkpoints"))))

    def best_checkpoint(self) -> dict[str, Any] | None:
        """Of the checkpoints that are still there, that with the best value of :attr:`metric`; else the newest."""
        best = self._master.get(self._path("best_checkpoint")).get("checkpoint")
        if best is not None:
            return from_wire(best)
        return next((c for c in self.checkpoints() if c["state"] == "COMPLETED"), None)

    def download_checkpoint(self, folder: Path | str, storage_id: str | None = None) -> Path:
        """Copy a checkpoint into a folder, and compare it with its manifest.

        Args:
            folder: where to; made if need be.
            storage_id: one of its :meth:`checkpoints`; None: the best.

        Returns:
            The folder.

        Raises:
            CheckpointNotFound: there is none.
            CheckpointCorrupt: a file differs from the manifest.
            StorageError: its storage cannot be read from here.
        """
        from det_core.client._fetched import fetch

        return fetch(self, storage_id, Path(folder))

    def pause(self) -> None:
        """Have its trials save and stop, to go on at :meth:`activate`."""
        self._do("pause")

    def activate(self) -> None:
        """Go on after :meth:`pause`."""
        self._do("activate")

    def cancel(self) -> None:
        """Have its trials save and stop for good."""
        self._do("cancel")

    def kill(self) -> None:
        """Kill its trials for good."""
        self._do("kill")

    def delete(self) -> None:
        """Delete it, with its checkpoints, metrics, TensorBoard files and logs. It must have ended."""
        self._master.request("DELETE", self._path())

    def go_on(self, overrides: Sequence[str] = ()) -> Experiment:
        """Continue it after its end: trials that are incomplete resume from their latest checkpoints.

        Args:
            overrides: another length for a single trial, as ``"searcher.max_length=100"``.

        Returns:
            Itself, in its new state.

        Raises:
            ConfigError: a change cannot be read.
            MasterError: it has not ended, or its search is complete.
        """
        from det_core.config import read_overrides

        changes = orjson.dumps(read_overrides(overrides)).decode() if overrides else ""
        body = {"id": self.id, "overrideConfig": changes}
        self._view = from_wire(self._master.post("experiments/continue", body, once=True)["experiment"])
        return self

    def _do(self, what: str) -> None:
        self._master.post(self._path(what))
        self.refresh()

    def _path(self, *more: str) -> str:
        return "/".join(["experiments", str(self.id), *more])
