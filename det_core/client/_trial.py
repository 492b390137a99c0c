"""A trial of an experiment, as Python sees it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from det_core._json import str_to_nonfinite
from det_core.client._master import TERMINAL, Master, list_rows
from det_core.errors import MasterUnreachable
from det_core.protocol.wire import from_wire

TOGETHER = 100
"""Trials whose metrics are asked for at a time."""
PAGE = 1000
"""Maximum number of lines in a page of a log."""


class Trial:
    """A trial, as it was when it was last asked for; :meth:`refresh` asks anew.

    Attributes:
        id: its number.
        experiment_id: the experiment that it belongs to.
    """

    def __init__(self, master: Master, told: Mapping[str, Any]) -> None:
        self._master = master
        self._view = from_wire(told)
        self.id = int(self._view["id"])
        self.experiment_id = int(self._view["experiment_id"])

    def __repr__(self) -> str:
        return f"Trial({self.id}, experiment_id={self.experiment_id}, state={self.state!r})"

    @property
    def info(self) -> dict[str, Any]:
        """All that the master says of it."""
        return self._view

    @property
    def state(self) -> str:
        """``QUEUED``, ``STARTING``, ``RUNNING``, ``ACTIVE`` (it waits for more to do), ``PAUSED``, ``COMPLETED``, …"""
        return str(self._view["state"])

    @property
    def ended(self) -> bool:
        """Whether nothing happens in it any more."""
        return self.state in TERMINAL

    @property
    def hparams(self) -> dict[str, Any]:
        """Its hyperparameters."""
        return dict(self._view.get("hparams") or {})

    @property
    def restarts(self) -> int:
        """How often it was started again after a failure."""
        return int(self._view.get("restarted", self._view.get("restarts")) or 0)

    @property
    def steps_completed(self) -> int:
        """The last step that it has reported."""
        return int(self._view.get("total_batches_processed") or 0)

    @property
    def latest_checkpoint(self) -> str | None:
        """The storage_id of the checkpoint that it would go on from."""
        return self._view.get("latest_checkpoint_uuid") or None

    @property
    def error(self) -> str | None:
        """Why its last run failed."""
        return self._view.get("error") or None

    @property
    def exit_status(self) -> int | None:
        """How the script ended its last run: 128 and the number of the signal if one ended it; None: not known."""
        status = self._view.get("exit_status")
        return None if status is None else int(status)

    @property
    def latest_validation(self) -> dict[str, Any] | None:
        """The metrics of its last validation."""
        return _validation(self._view.get("latest_validation"))

    @property
    def best_validation(self) -> dict[str, Any] | None:
        """The metrics of its best validation, by the metric that is searched for."""
        return _validation(self._view.get("best_validation"))

    @property
    def best_metric(self) -> float | None:
        """The best value of the metric that is searched for."""
        best = (self._view.get("best_validation") or {}).get("searcherMetric")
        return None if best is None else float(str_to_nonfinite(best))

    def refresh(self) -> Trial:
        """Ask for its present state; returns itself."""
        self._view = from_wire(self._master.get(f"trials/{self.id}")["trial"])
        return self

    def metrics(self, group: str | None = None) -> Any:
        """Its metrics as a table; see :meth:`Experiment.metrics`."""
        return trial_metrics(self._master, [self.id], group)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Its checkpoints, newest first, those deleted since included: see ``state``."""
        return list(map(from_wire, list_rows(self._master, f"trials/{self.id}/checkpoints")))

    def logs(self, *, after: int = 0, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield its log lines: ``id``, ``timestamp`` in seconds, ``level``, ``rank_id``, ``stdtype``, ``log``.

        Args:
            after: Only lines with a greater ``id``.
            follow: Whether to wait for more until the trial has ended.
        """
        while True:
            try:
                with self._master.lines(f"trials/{self.id}/logs", {"after": after, "follow": follow}) as lines:
                    for told in lines:
                        line = _line(told)
                        after = line["id"]
                        yield line
            except MasterUnreachable:
                # A stream that is followed breaks when the master is restarted or nothing is printed for a minute.
                if not follow:
                    raise
            if not follow or self.refresh().ended:
                return

    def kill(self) -> None:
        """Kill it for good; the search goes on without it."""
        self._master.post(f"trials/{self.id}/kill")
        self.refresh()


def log_page(master: Master, trial_id: int, after: int) -> list[dict[str, Any]]:
    """Return the next lines of a trial's log so far, at most :data:`PAGE`.

    Args:
        master: Master of the trial.
        trial_id: ID of the trial.
        after: Only lines with a greater ``id``.
    """
    with master.lines(f"trials/{trial_id}/logs", {"after": after, "limit": PAGE}) as lines:
        return [_line(told) for told in lines]


def trial_metrics(master: Master, trials: Sequence[int], group: str | None) -> Any:
    """The metrics of trials as a table; see :meth:`Experiment.metrics`."""
    table = []
    for row in metric_rows(master, trials, group):
        head = {key: row[key] for key in ("trial_id", "group", "steps_completed", "time", "trial_run_id")}
        table.append(head | {f"metrics.{k}" if k in head else k: v for k, v in _spread(row["metrics"]).items()})
    if importlib.util.find_spec("pandas") is None:
        return table
    import pandas

    return pandas.DataFrame.from_records(table, columns=list(dict.fromkeys(name for row in table for name in row)))


def metric_rows(master: Master, trials: Sequence[int], group: str | None) -> Iterator[dict[str, Any]]:
    """The rows of trials' metrics, in the order in which they came."""
    for at in range(0, len(trials), TOGETHER):
        query = {"trialIds": list(trials[at : at + TOGETHER]), "group": group}
        with master.lines("trials/metrics/trial_metrics", query) as pages:
            for page in pages:
                yield from (_row(told) for told in page["metrics"] if not told.get("archived"))


def _row(told: Mapping[str, Any]) -> dict[str, Any]:
    row = from_wire(told)
    metrics = row.get("metrics") or {}
    return {
        "trial_id": int(row["trial_id"]),
        "group": row.get("group"),
        "steps_completed": row.get("total_batches"),
        "time": row.get("end_time"),
        "trial_run_id": row.get("trial_run_id"),
        "metrics": str_to_nonfinite(metrics.get("avg_metrics", metrics.get("avgMetrics", metrics))),
    }


def _spread(metrics: Mapping[str, Any]) -> dict[str, Any]:
    from det_core.client._table import spread

    return spread(metrics)


def _line(told: Mapping[str, Any]) -> dict[str, Any]:
    line = from_wire(told)
    line["id"] = int(line["id"])
    return line


def _validation(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not told:
        return None
    row = from_wire(told)
    metrics = row.get("metrics") or {}
    return {**row, "metrics": str_to_nonfinite(metrics.get("avgMetrics", metrics.get("avg_metrics", metrics)))}
