"""Retention at work: a run's checkpoints judged by a policy, and those deleted that are to go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from det_core import _clock
from det_core._errors import CheckpointError, CheckpointNotFound, DetCoreError, StorageError
from det_core.core._checkpoint._values import Values
from det_core.storage import (
    AnyOf,
    Candidate,
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
        self._warned = False

    def apply(self, committed: str | None = None) -> list[str]:
        """Delete what is to go, oldest first. What cannot be deleted is tried again at the next call.

        Never raises for what the store or the disk refuses: that is one warning.

        Args:
            committed: the storage_id of a checkpoint that has just been committed, and so needs no look.

        Returns:
            the storage_ids that are gone.
        """
        try:
            going = [v.candidate for v in self.judge(committed) if not v.reasons]
        except (DetCoreError, OSError) as e:
            self._warn(f"older checkpoints of run {self._run_id} were not looked through, and stay for now: {e}")
            return []
        return self.delete(going)

    def judge(self, committed: str | None = None) -> list[Verdict]:
        """What is to become of each checkpoint of the run, oldest first. Deletes nothing.

        Raises:
            StorageError: the store refused.
        """
        headers = self._store.list(self._run_id)
        found = self._values.candidates(headers, self.policy.metrics)
        in_use, now = self._store.in_use(), _clock.now()
        verdicts = judge(self.policy, found, run_id=self._run_id, in_use=in_use, now=now)
        if all(v.reasons for v in verdicts):
            return verdicts
        damaged = self._damaged([v.candidate for v in verdicts], committed)
        if not damaged:
            return verdicts
        found = [replace(c, damaged=c.storage_id in damaged) for c in found]
        return judge(self.policy, found, run_id=self._run_id, in_use=in_use, now=now)

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

    def _damaged(self, newest_last: list[Candidate], committed: str | None) -> set[str]:
        """The newest ones, up to one that is whole, whose files are missing or have another size."""
        damaged = set()
        for c in reversed(newest_last):
            if c.storage_id == committed:
                break
            try:
                checkpoint = self._store.open(c.storage_id)
                checkpoint.check(checkpoint.manifest.files, digests=False)
                break
            except StorageError:
                raise
            except CheckpointError as e:
                log.warning("the checkpoint before %s stays, too: %s", c.storage_id, e)
                damaged.add(c.storage_id)
        return damaged

    def _warn(self, text: str) -> None:
        log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", text)
        self._warned = True


__all__ = ["AnyOf", "KeepBest", "KeepEvery", "KeepLatest", "KeepNewer", "Retention", "RetentionPolicy"]
