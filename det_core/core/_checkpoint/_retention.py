"""Retention at work: a run's checkpoints judged by a policy, and those deleted that are to go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.core._checkpoint._values import Values
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, DetCoreError, StorageError
from det_core.storage import (
    AnyOf,
    Candidate,
    Header,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewer,
    RetentionPolicy,
    Store,
    Verdict,
    check_policy,
    judge,
)

log = logging.getLogger("det_core.checkpoint")
FAILURES = 3
"""Deletes that may fail one after the other before the rest waits for the next time: the store is in trouble."""
FIRST = 2
"""Checkpoints that may have to wait for a validation without a word."""
BELIEVED = 300.0
"""Seconds for which a checkpoint that was seen in the store is taken to be there."""


class Retention:
    """A policy applied to the checkpoints of one run, as often as wanted.

    It is the chief's, in the thread that commits: :meth:`apply` after each commit, so that the new checkpoint is
    there before an older one goes.

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
        self._values = Values(store, folder)
        self._failed: set[str] = set()
        self._known: dict[str, Header] = {}
        self._seen: dict[str, float] = {}
        self._listed = False
        self._told = False
        self._warned = False

    def apply(self, committed: Mapping[str, Any] | None = None) -> list[str]:
        """Delete what is to go, oldest first. What cannot be deleted is tried again at the next call.

        Never raises for what the store or the disk refuses: that is one warning.

        Args:
            committed: the record of a checkpoint that has just been committed. This process being the only one that
                commits, the others are known, so that a store with those of many runs need not be listed each time.

        Returns:
            the storage_ids that are gone.
        """
        try:
            verdicts = self.judge() if committed is None else self._judge_known(_header(committed))
        except (DetCoreError, OSError) as e:
            self._warn(f"older checkpoints of run {self._run_id} were not looked through, and stay for now: {e}")
            return []
        self._tell_of_unknown(verdicts)
        return self.delete([v.candidate for v in verdicts if not v.reasons])

    def judge(self) -> list[Verdict]:
        """What is to become of each checkpoint of the run, oldest first. Deletes nothing.

        Raises:
            StorageError: the store refused.
        """
        headers = self._store.list(self._run_id)
        verdicts = self._verdicts(headers)
        if all(v.reasons for v in verdicts):
            return verdicts
        return self._verdicts(headers, self._store.in_use(), self._damaged(verdicts))

    def forget(self, storage_id: str) -> None:
        """A checkpoint was deleted by somebody else."""
        self._known.pop(storage_id, None)

    def _judge_known(self, committed: Header) -> list[Verdict]:
        """As :meth:`judge`, of the checkpoints that are known; those that count against others are seen to be there."""
        if not self._listed:
            first = (committed.restart, committed.ordinal) == (0, 1)
            self._known = {h.storage_id: h for h in ([] if first else self._store.list(self._run_id))}
            self._listed = True
        self._known[committed.storage_id] = committed
        self._seen[committed.storage_id] = _clock.monotonic()
        while True:
            verdicts = self._verdicts(list(self._known.values()))
            if all(v.reasons for v in verdicts):
                return verdicts
            lost = [
                v.candidate.storage_id for v in verdicts if v.reasons and not self._is_there(v.candidate.storage_id)
            ]
            if not lost:
                return self._verdicts(list(self._known.values()), self._store.in_use())
            for storage_id in lost:
                self.forget(storage_id)

    def _is_there(self, storage_id: str) -> bool:
        now = _clock.monotonic()
        if now - self._seen.get(storage_id, -BELIEVED) < BELIEVED:
            return True
        try:
            self._store.open(storage_id)
        except (CheckpointNotFound, CheckpointCorrupt):
            return False
        self._seen[storage_id] = now
        return True

    def _verdicts(
        self, headers: Sequence[Header], in_use: Collection[str] = (), damaged: Collection[str] = ()
    ) -> list[Verdict]:
        found = self._values.candidates(headers, self.policy.metrics)
        found = [replace(c, damaged=c.storage_id in damaged) for c in found]
        return judge(self.policy, found, run_id=self._run_id, in_use=in_use, now=_clock.now())

    def delete(self, going: list[Candidate]) -> list[str]:
        """Delete these, but for one that a process has begun to read; see :meth:`apply`."""
        gone: list[str] = []
        problems: list[str] = []
        in_a_row = 0
        for c in sorted(going, key=lambda c: c.storage_id in self._failed):  # stable: what failed before comes last
            if in_a_row == FAILURES:
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
            self.forget(c.storage_id)
            in_a_row = 0
            gone.append(c.storage_id)
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

    def _damaged(self, verdicts: Sequence[Verdict]) -> set[str]:
        """The newest ones, up to one that is whole, whose files are missing or have another size."""
        damaged = set()
        for storage_id in (v.candidate.storage_id for v in reversed(verdicts)):
            try:
                checkpoint = self._store.open(storage_id)
                checkpoint.check(checkpoint.manifest.files, digests=False)
                break
            except StorageError:
                raise
            except CheckpointError as e:
                log.warning("the checkpoint before %s stays, too: %s", storage_id, e)
                damaged.add(storage_id)
        return damaged

    def _tell_of_unknown(self, verdicts: Sequence[Verdict]) -> None:
        """Warn once if nothing goes only as no checkpoint has a metric; of the first ones none may be validated yet."""
        held = [v.reasons[0] for v in verdicts if v.reasons and v.reasons == v.unknown]
        if len(held) > FIRST and not self._told:
            self._told = True
            log.warning("%s, so retention deletes none: is it the name of a validation metric?", held[0])

    def _warn(self, text: str) -> None:
        log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", text)
        self._warned = True


def _header(record: Mapping[str, Any]) -> Header:
    return Header(**{f.name: record[f.name] for f in fields(Header)})


__all__ = ["AnyOf", "KeepBest", "KeepEvery", "KeepLatest", "KeepNewer", "Retention", "RetentionPolicy"]
