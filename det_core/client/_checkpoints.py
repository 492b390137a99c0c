"""The checkpoints of a store, as Python sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from det_core.client._checkpoint import Checkpoint
from det_core.client._find import LATEST
from det_core.client._run import registered
from det_core.client._storage import run_folder
from det_core.client._table import spread
from det_core.core._checkpoint._retention import VALIDATION_GROUP, Retention
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, RunError, RunLocked, StorageError
from det_core.journal import Journal, RunSummary, ambiguous_id, lock_run, match_id, read_run
from det_core.storage import Header, RetentionDecision, RetentionPolicy, Store

log = logging.getLogger("det_core.client")


class Checkpoints:
    """The complete checkpoints of a store, of one run or of all. Oldest first within a run; looked up at each use.

    ``with`` gives the connections to a cloud store back at the end, as :meth:`close` does.

    Attributes:
        run_id: the run; None: every run that the store has checkpoints of.
    """

    def __init__(self, store: Store, run_id: str | None, home: Path | str | None) -> None:
        self._store = store
        self._home = home
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"Checkpoints({self.root!r}, run_id={self.run_id!r})"

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter([self._checkpoint(header.storage_id, header) for header in self._headers()])

    def __len__(self) -> int:
        return len(self._headers())

    def __getitem__(self, storage_id: str) -> Checkpoint:
        """A checkpoint by its id, by the beginning of it, or as ``latest``.

        Raises:
            CheckpointNotFound: none has that id, or several begin with it.
        """
        headers = {header.storage_id: header for header in self._headers()}
        if storage_id == LATEST and headers:
            return self._checkpoint(*list(headers.items())[-1])
        found = match_id(storage_id, headers)
        if len(found) > 1:
            raise CheckpointNotFound(ambiguous_id(storage_id, found, "checkpoints"))
        if found:
            return self._checkpoint(found[0], headers[found[0]])
        return self._unlisted(storage_id)

    @property
    def root(self) -> str:
        """Where the store is."""
        return self._store.root

    @property
    def in_use(self) -> set[str]:
        """The storage_ids of those that a process reads now."""
        return self._store.in_use()

    def damaged(self) -> dict[str, str]:
        """Those that runs kept here have registered, and that are not listed as their manifests cannot be used.

        Returns:
            what is wrong, by storage_id.

        Raises:
            StorageError: the store refused to be listed.
        """
        listed = {header.storage_id for header in self._headers()}
        problems = {}
        for run_id in self._runs():
            if (folder := run_folder(run_id, self._home)) is not None:
                for storage_id in registered(read_run(folder)) - listed:
                    try:
                        self._store.open(storage_id)
                    except CheckpointNotFound:
                        continue
                    except (CheckpointCorrupt, StorageError) as e:
                        problems[storage_id] = str(e.args[-1])
        return problems

    def run_ids(self) -> list[str]:
        """The runs that it has checkpoints of, sorted."""
        return sorted({header.run_id for header in self._headers()})

    def of_run(self, run_id: str) -> Checkpoints:
        """Those of one run in the same store.

        Args:
            run_id: its whole id.
        """
        return Checkpoints(self._store, run_id, self._home)

    def preview_gc(self, policy: RetentionPolicy) -> list[RetentionDecision]:
        """What would become of each checkpoint under a policy, and why. Each run is judged by itself.

        Raises:
            StorageError: the store refused.
        """
        return [verdict for run_id in self._runs() for verdict in self._retention(policy, run_id).evaluate_all()]

    def metrics(self) -> list[str]:
        """The names of the validation metrics of its runs that are kept here, sorted; ``a.b`` for b within a."""
        folders = [folder for run_id in self._runs() if (folder := run_folder(run_id, self._home)) is not None]
        rows = (row for folder in folders for row in read_run(folder).iter_rows(VALIDATION_GROUP))
        return sorted({name for row in rows for name in spread(row.metrics)})

    def gc(
        self,
        policy: RetentionPolicy,
        deleted: Callable[[str], None] | None = None,
        *,
        judged: Iterable[RetentionDecision] | None = None,
    ) -> list[str]:
        """Delete what a policy does not keep, oldest first, and what dead writers left; each run by itself.

        What cannot be deleted is logged as a warning, and stays. So does what the policy keeps by the time, as another
        process has deleted others since it was judged.

        Args:
            policy: such as ``core.KeepLatest(3) | core.KeepBest(1, "loss")``.
            deleted: called with the storage_id of each that was deleted.
            judged: what :meth:`judge` returned for this policy. What was committed since is left alone then, however
                many there are. Defaults to judging now.

        Returns:
            the storage_ids of those that were deleted.

        Raises:
            StorageError: the store refused to be listed.
        """
        going: dict[str, set[str]] = {}
        for verdict in self.preview_gc(policy) if judged is None else judged:
            if not verdict.reasons:
                going.setdefault(verdict.candidate.run_id, set()).add(verdict.candidate.storage_id)
        gone: list[str] = []
        for run_id, storage_ids in going.items():
            found = self._retention(policy, run_id, deleted).delete(storage_ids)
            if found:
                self._note(run_id, found)
            gone += found
        self._store.collect()
        return gone

    def close(self) -> None:
        """Give connections back, if there are any; a later call makes new ones."""
        self._store.close()

    def _checkpoint(self, storage_id: str, header: Header | None) -> Checkpoint:
        return Checkpoint(self._store, storage_id, header, lambda run_id: self._note(run_id, [storage_id]))

    def _headers(self) -> list[Header]:
        return self._store.list(self.run_id)

    def _runs(self) -> list[str]:
        return self.run_ids() if self.run_id is None else [self.run_id]

    def _retention(
        self, policy: RetentionPolicy, run_id: str, deleted: Callable[[str], None] | None = None
    ) -> Retention:
        folder = run_folder(run_id, self._home)
        tell = None if deleted is None else lambda storage_id, _left: deleted(storage_id)
        return Retention(policy, self._store, run_id, folder=folder, deleted=tell)

    def _unlisted(self, storage_id: str) -> Checkpoint:
        """One by its whole id that is of another run, or that others wrote."""
        try:
            header = self._store.open(storage_id).manifest.header
        except CheckpointNotFound as e:
            where = f"run {self.run_id} in {self.root}" if self.run_id else self.root
            raise CheckpointNotFound(
                f"no checkpoint {storage_id!r} of {where}; `det-core checkpoint list` shows those there are"
            ) from e
        return self._checkpoint(storage_id, header)

    def _note(self, run_id: str, storage_ids: list[str]) -> None:
        """Write into a run's journal that checkpoints are gone, unless the run is being written or not kept here."""
        folder = run_folder(run_id, self._home)
        if folder is None:
            return
        try:
            with lock_run(folder):
                restart = max(RunSummary(folder).starts - 1, 0)
                journal = Journal(folder, run_id=run_id, restart=restart, rank=0)
                try:
                    for storage_id in storage_ids:
                        body: Mapping[str, Any] = {"storage_id": storage_id, "resources": {}}
                        journal.record("checkpoint_deleted", body)
                finally:
                    journal.close()
        except RunLocked:
            log.warning("run %s is running, so its record still names what was deleted", run_id)
        except (RunError, OSError) as e:
            log.warning("the journal of run %s still names what was deleted: %s", run_id, e)
