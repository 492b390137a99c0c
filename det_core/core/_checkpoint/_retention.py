"""Retention at work: a run's checkpoints judged by a policy and their metrics, and those deleted that are to go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, DetCoreError, StorageError
from det_core.journal import Cursor, open_cursors
from det_core.storage import (
    AnyOf,
    Candidate,
    Header,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWithin,
    RetentionDecision,
    RetentionPolicy,
    Store,
    check_policy,
    evaluate,
)

log = logging.getLogger("det_core.checkpoint")
VALIDATION_GROUP = "validation"
MAX_CONSECUTIVE_FAILURES = 3
"""Deletes that may fail one after the other before the rest waits for the next time: the store is in trouble."""
UNVALIDATED_ALLOWED = 2
"""Checkpoints that may wait for a first validation before a policy that goes by a metric is doubted."""


class Retention:
    """A policy applied to the checkpoints of one run, as often as wanted.

    It is the chief's, in the thread that commits: :meth:`apply` after each commit, so that the new checkpoint is
    there before an older one goes.

    Other processes may delete checkpoints of the run at any time, so nothing is deleted by what is remembered of the
    store alone: the checkpoints that are remembered are looked up again first, and the policy is applied to those that
    are still there. What another process deletes after that look counts as deleted after this call.

    Args:
        policy: which checkpoints stay.
        store: where they lie.
        run_id: the run; checkpoints of others are left alone.
        folder: the run's folder, with the validation metrics in its journals; None: only metadata is asked.
        deleted: called with the storage_id of each that was deleted, and the resources that are left of it (none).

    Raises:
        TypeError: ``policy`` is none.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        store: Store,
        run_id: str,
        *,
        folder: Path | None = None,
        deleted: Callable[[str, Mapping[str, int]], None] | None = None,
    ) -> None:
        check_policy(policy)
        self.policy = policy
        self._store = store
        self._run_id = run_id
        self._deleted = deleted
        self._validations = None
        if folder is not None:
            self._validations = Validations(folder)
        self._metadata: dict[str, Mapping[str, Any]] = {}
        self._known: dict[str, Header] | None = None
        """The checkpoints of the run when they were looked up last, and those committed since."""
        self._committed: str | None = None
        """The checkpoint that this process has just committed, so that its files need not be looked at."""
        self._damaged: set[str] = set()
        self._failed: set[str] = set()
        self._doubted = False
        """Whether a warning named a metric that no checkpoint has."""
        self._warned = False

    def apply(self, committed: Mapping[str, Any] | None = None) -> list[str]:
        """Delete what is to go, oldest first. What cannot be deleted is tried again at the next call.

        Never raises for what the store or the disk refuses: that is one warning.

        Args:
            committed: the record of a checkpoint that has just been committed. This process being the only one that
                commits, the others are known, and the store is asked nothing unless one of them is to go.

        Returns:
            the storage_ids that are gone.
        """
        try:
            if committed is None:
                self._known = None
                self._look()
            else:
                self._remember(committed)
            verdicts = self._verdicts()
            self._doubt_metric(verdicts)
            return self.delete({v.candidate.storage_id for v in verdicts if not v.reasons})
        except (DetCoreError, OSError) as e:
            self._warn(f"older checkpoints of run {self._run_id} were not looked through, and stay for now: {e}")
            return []

    def evaluate_all(self) -> list[RetentionDecision]:
        """Return the policy's decision on each checkpoint of the run, oldest first. Deletes nothing.

        Raises:
            StorageError: the store refused.
        """
        self._look()
        return self._guarded_verdicts()

    def delete(self, going: Collection[str]) -> list[str]:
        """Delete those of these checkpoints that are to go now; see :meth:`apply`.

        Args:
            going: the storage_ids that were to go by an earlier judgement. No others are deleted.

        Raises:
            StorageError: the store refused to be looked at. One that cannot be deleted is a warning.
        """
        if not going:
            self._warned = False
            return []
        self._look()
        still = [v.candidate for v in self._guarded_verdicts() if not v.reasons and v.candidate.storage_id in going]
        gone: list[str] = []
        problems: list[str] = []
        in_a_row = 0
        for c in sorted(still, key=lambda c: c.storage_id in self._failed):  # stable: what failed before comes last
            if in_a_row == MAX_CONSECUTIVE_FAILURES:
                break
            try:
                if c.storage_id in self._store.in_use():
                    continue
                self._delete(c.storage_id)
            except (CheckpointError, OSError) as e:
                problems.append(f"{c.storage_id}: {e}")
                self._failed.add(c.storage_id)
                in_a_row += 1
                continue
            self._failed.discard(c.storage_id)
            in_a_row = 0
            gone.append(c.storage_id)
            if self._known is not None:
                self._known.pop(c.storage_id, None)
            log.info("deleted checkpoint %s of step %d; kept: %s", c.storage_id, c.steps_completed, self.policy)
            if self._deleted is not None:
                self._deleted(c.storage_id, {})
        if problems:
            self._warn(f"{len(problems)} older checkpoint(s) could not be deleted, and stay for now: {problems[0]}")
        else:
            self._warned = False
        return gone

    def _delete(self, storage_id: str) -> None:
        """Delete one. It is gone as soon as it is not listed; what is left of its bytes is collected by others."""
        try:
            self._store.delete(storage_id)
        except StorageError as e:
            try:
                self._store.open(storage_id)
            except CheckpointNotFound:
                log.warning("checkpoint %s is deleted, but some of its bytes wait to be collected: %s", storage_id, e)
                return
            raise

    def _look(self) -> None:
        """Look up which checkpoints of the run the store has."""
        if self._known is None:
            headers = self._store.list(self._run_id)
        else:  # nobody else adds any, and a listing would read the manifests of all other runs in the store
            headers = self._store.list_again(self._known.values())
        self._known = {header.storage_id: header for header in headers}

    def _remember(self, committed: Mapping[str, Any]) -> None:
        """Add the checkpoint that was just committed to those that are known."""
        header = Header(**{f.name: committed[f.name] for f in fields(Header)})
        if (header.restart, header.ordinal) == (0, 1):
            self._known = {}
        elif self._known is None:
            self._look()
        assert self._known is not None
        self._known[header.storage_id] = header
        self._committed = header.storage_id

    def _guarded_verdicts(self) -> list[RetentionDecision]:
        """Judge what is known; before any goes, ask which are read and which are damaged."""
        verdicts = self._verdicts()
        if all(v.reasons for v in verdicts):
            return verdicts
        return self._verdicts(self._store.in_use(), self._find_damaged(verdicts))

    def _verdicts(self, in_use: Collection[str] = (), damaged: Collection[str] = ()) -> list[RetentionDecision]:
        found = [
            replace(c, damaged=c.storage_id in damaged) for c in self.candidates(list((self._known or {}).values()))
        ]
        return evaluate(self.policy, found, run_id=self._run_id, in_use=in_use, now=_clock.now())

    def _find_damaged(self, verdicts: Sequence[RetentionDecision]) -> set[str]:
        """Return the newest ones, up to an intact one, whose files are missing or have another size."""
        damaged = set()
        for storage_id in (v.candidate.storage_id for v in reversed(verdicts)):
            if storage_id == self._committed:
                break
            try:
                checkpoint = self._store.open(storage_id)
                checkpoint.check(checkpoint.manifest.files, digests=False)
                break
            except StorageError:
                raise
            except CheckpointError as e:
                damaged.add(storage_id)
                if storage_id not in self._damaged:
                    self._damaged.add(storage_id)
                    log.warning("the checkpoint before %s stays, too: %s", storage_id, e)
        return damaged

    def candidates(self, headers: Sequence[Header]) -> list[Candidate]:
        """Return the checkpoints with the metrics that the policy decides by.

        Those are what was reported for a checkpoint's step, by any rank, else what its own metadata has.

        Raises:
            StorageError: the store refused.
        """
        names = self.policy.metrics
        if names and self._validations is not None:
            self._validations.refresh()
        return [
            Candidate(
                h.storage_id, h.steps_completed, commit_time(h), h.restart, h.ordinal, self._numbers(h, names), h.run_id
            )
            for h in headers
        ]

    def _numbers(self, header: Header, names: Collection[str]) -> dict[str, float]:
        reported = {}
        if names and self._validations is not None:
            reported = self._validations.of(header)
        numbers = {}
        for name in names:
            value = find_number(reported, name)
            if value is None:
                value = find_number(self._metadata_of(header), name)
            if value is not None:
                numbers[name] = value
        return numbers

    def _metadata_of(self, header: Header) -> Mapping[str, Any]:
        known = self._metadata.get(header.storage_id)
        if known is None:
            try:
                known = self._store.open(header.storage_id).metadata()
            except (CheckpointNotFound, CheckpointCorrupt):
                known = {}
            self._metadata[header.storage_id] = known
        return known

    def _doubt_metric(self, verdicts: Sequence[RetentionDecision]) -> None:
        """Warn once, from the second checkpoint on, that nothing goes as no checkpoint has a metric.

        Validation may come after the first checkpoints. But once one was reported without the metric, or checkpoints
        pile up without any, the name is probably wrong.
        """
        if self._doubted or len(verdicts) < 2 or not verdicts[-1].unknown:
            return
        reported = set()
        if self._validations is not None:
            reported = self._validations.names
        having = {name for v in verdicts for name in v.candidate.metrics}
        misnamed = sorted(self.policy.metrics - having - reported)
        held = [v for v in verdicts if v.reasons == v.unknown]
        if reported and misnamed:
            hint = f"validation metrics are {', '.join(sorted(reported))}"
            log.warning("no checkpoint has the metric %s, so retention deletes none; %s", misnamed[0], hint)
        elif len(held) > UNVALIDATED_ALLOWED:
            hint = "is it the name of a validation metric?"
            log.warning("%s, so retention deletes none: %s", verdicts[-1].unknown[0], hint)
        else:
            return
        self._doubted = True

    def _warn(self, text: str) -> None:
        log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", text)
        self._warned = True


class Validations:
    """The validation metrics of a run, by checkpoint. What is new in the journals is read at each :meth:`refresh`.

    Args:
        folder: the run's folder.

    Attributes:
        names: the metrics that were reported so far; ``a.b`` for b within a.
    """

    def __init__(self, folder: Path) -> None:
        self.names: set[str] = set()
        self._folder = folder
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._rows: dict[int, dict[tuple[int, int, int], Mapping[str, Any]]] = {}
        self._began: dict[int, int] = {}

    def refresh(self) -> None:
        """Take in what was reported since the last time, by any rank."""
        for found in open_cursors(self._folder, name="unsaved"):
            cursor = self._cursors.setdefault((found.restart, found.rank), found)
            while lines := cursor.read():
                cursor.advance(lines)
                for line in lines:
                    if line.record["kind"] == "restore" or line.record.get("group") == VALIDATION_GROUP:
                        self._take(cursor.restart, cursor.rank, line.decoded())

    def _take(self, restart: int, rank: int, record: Mapping[str, Any]) -> None:
        restored = record["kind"] == "restore"
        if restored:
            step = record["body"].get("steps_completed")
        else:
            step = record["steps_completed"]
        if not isinstance(step, int):
            return
        self._began[restart] = min(step, self._began.get(restart, step))
        if not restored:
            self._rows.setdefault(step, {})[restart, rank, record["seq"]] = record["metrics"]
            self.names.update(_names_in(record["metrics"]))

    def of(self, header: Header) -> dict[str, Any]:
        """Return the valid metrics of a checkpoint's step; where ranks differ, those of the lowest.

        None, if a restart since then began below that step: what it reported is about other weights.
        """
        step = header.steps_completed
        rows = self._rows.get(step, {})
        restart = max((key[0] for key in rows), default=-1)
        if any(r > min(restart, header.restart) and began < step for r, began in self._began.items()):
            return {}
        metrics: dict[str, Any] = {}
        for key in sorted(rows, reverse=True):
            metrics |= rows[key] if key[0] == restart else {}
        return metrics


def find_number(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the number called ``name``, or None; ``a.b`` may also be ``b`` within ``a``."""
    for path in _paths(name):
        value: Any = metrics
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _names_in(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of the values in metrics, with dots for those within another."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _names_in(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _paths(name: str) -> Iterable[list[str]]:
    yield [name]
    for i, c in enumerate(name):
        if c == ".":
            yield from ([name[:i], *rest] for rest in _paths(name[i + 1 :]))


def commit_time(header: Header) -> float:
    """When a checkpoint was committed, in seconds since the epoch; infinite where that cannot be read."""
    try:
        return _clock.parse_time(header.time)
    except ValueError:
        return float("inf")


__all__ = ["AnyOf", "KeepBest", "KeepEvery", "KeepLatest", "KeepWithin", "Retention", "RetentionPolicy"]
