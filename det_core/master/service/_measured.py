"""Checks that the trials of an experiment report the metric of its search, and warnings if they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from det_core.config import Experiment
from det_core.master.scheduler import State
from det_core.master.store import models, trials, validations

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


VALIDATION = "validation"
"""The metric group of validations."""
LOOKED_AT = 20
"""Trials whose metrics are looked at for their names."""
_BLIND = ("single", "random", "grid", "custom")
"""Searchers that decide without the metric, or may."""


@dataclass
class Measured:
    """Metrics in the validations of an experiment that has not ended.

    Attributes:
        metric: the one that is searched for.
        names: of those that trials report.
        first: trial -> the step of its first validation that was seen.
        known: whether some validation had the metric.
        warning: warning given because none has.
    """

    metric: str
    names: set[str] = field(default_factory=set)
    first: dict[int, int] = field(default_factory=dict)
    known: bool = False
    warning: str | None = None

    def take_in(self, trial_id: int, records: Sequence[Mapping[str, Any]]) -> str | None:
        """Note the records of a trial; return a warning, once, when its metric is missing.

        That is so when it has completed an operation, or gone on to a second validation: what belongs to one step may
        be reported bit by bit.
        """
        due = False
        for record in records:
            if record.get("kind") == "operation":
                due = True
            elif record.get("kind") == "metrics" and record.get("group") == VALIDATION:
                self.names |= record["metrics"].keys()
                self.known |= validations.number(record["metrics"], self.metric) is not None
                step = record.get("steps_completed")
                due |= step is not None and self.first.setdefault(trial_id, step) != step
        if self.known or self.warning is not None or not due:
            return None
        self.warning = missing(self.metric, self.names)
        return self.warning


def missing(metric: str, names: Sequence[str] | set[str]) -> str:
    """Return the message that no validation has the metric of a search, with what trials report instead."""
    reported = ", ".join(sorted(names)) or "no validation metrics"
    return f"no validation has `{metric}`, the metric of the search; trials report: {reported}"


def is_search(spec: Experiment) -> bool:
    """Return whether trials are compared at all."""
    return bool(spec.searcher["name"] != "single")


def fault(session: Session, row: models.Experiment) -> str | None:
    """Return the error of a completed search whose metric was never reported, or None.

    What a script says with a completed operation counts, whatever its validations are called; and so does a trial that
    gave up or was killed.
    """
    spec = Experiment(row.config)
    if not is_search(spec) or _has_completed(session, row.id) or validations.bests(session, row.id):
        return None
    ended = [t for t in trials.of_experiment(session, row.id) if t.state == State.COMPLETED and t.early_exit is None]
    names = _names(session, ended)
    if not ended or (not names and spec.searcher["name"] in _BLIND):
        return None
    return missing(spec.metric, names)


def _has_completed(session: Session, experiment_id: int) -> bool:
    """Return whether a trial of an experiment has completed an operation."""
    chosen = (models.Trial.experiment_id == experiment_id) & models.Operation.completed
    return session.scalar(select(models.Operation.trial_id).join(models.Trial).where(chosen).limit(1)) is not None


def remarks(session: Session, row: models.Experiment) -> list[str]:
    """Return the remarks on an ended search: no trial can be called best, or all are equal."""
    spec = Experiment(row.config)
    if not is_search(spec) or row.state != State.COMPLETED:
        return []
    best = validations.bests(session, row.id)
    found = trials.of_experiment(session, row.id)
    if not best:
        names = _names(session, found)
        if not names and not _has_completed(session, row.id):
            return []
        return [missing(spec.metric, names)]
    measured = [t for t in found if t.id in best]
    keys = {key for t in measured for key in t.hparams if t.hparams[key] != measured[0].hparams.get(key)}
    if keys and len(set(best.values())) == 1:
        named = ", ".join(sorted(keys))
        return [f"all {len(measured)} trials report the same `{spec.metric}`: does the script use {named}?"]
    return []


def _names(session: Session, found: Sequence[models.Trial]) -> set[str]:
    latest, _ = validations.latest_and_best(session, [trial.id for trial in found[:LOOKED_AT]])
    return {name for row in latest.values() for name in row.metrics}
