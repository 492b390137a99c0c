"""Checkpoints in a store: of one run or of all, of an experiment; and the deletion of a run with what it stored."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from det_core.client._runs import LATEST, Run, find, home_of, registered, run_folder
from det_core.client._table import spread
from det_core.core._checkpoint._download import download
from det_core.core._checkpoint._reader import open_on_all
from det_core.core._checkpoint._retention import VALIDATION_GROUP, Retention, commit_time
from det_core.core._rank_group import RankGroup
from det_core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    MissingExtra,
    RunError,
    RunLocked,
    RunNotFound,
    StorageError,
)
from det_core.journal import Journal, RunSummary, ambiguous_id, lock_run, match_id, read_run
from det_core.storage import (
    Header,
    Owner,
    Progress,
    RetentionDecision,
    RetentionPolicy,
    Selector,
    Store,
    StoredCheckpoint,
    event_files_of_run,
    open_store,
)

Storage = str | os.PathLike[str] | Mapping[str, Any]
"""As ``core.init(checkpoint_storage=)`` takes it; also the JSON of a mapping."""
FILES_AT_A_TIME = 64
"""Files that are compared at a time; only among those of which one is damaged is each looked at alone."""
MAX_REFUSALS = 3
"""Files that a store may fail to read one after the other before the store itself counts as failed."""
logger = logging.getLogger("det_core.client")


def checkpoints(storage: Storage | None = None, run: str | None = None, home: Path | str | None = None) -> Checkpoints:
    """Return the checkpoints of a store.

    Args:
        storage: As ``core.init(checkpoint_storage=)`` takes it, or the JSON of a mapping. Defaults to the store that
            the run wrote to.
        run: ID, the beginning of one, or ``"latest"``: only that run's. Defaults to every run in ``storage``, or,
            without ``storage``, to the newest run here.
        home: See :func:`det_core.client.runs`.

    Raises:
        ValueError: If ``storage`` names no store.
        RunNotFound: If no run has that name, or several begin with it.
        CheckpointError: If the store that the run wrote to cannot be opened here.
    """
    if storage is not None:
        store = open_store(_parse(storage), default=home_of(home))
        run_id = None
        if run is not None:
            run_id = _run_in(store, run, home)
        return Checkpoints(store, run_id, home)
    source = Run(find(run or LATEST, home))
    try:
        store = open_store(source.storage, default=source.path / "checkpoints")
    except ValueError as e:
        raise CheckpointError(
            f"run {source.run_id} kept its checkpoints in {source.storage}, which cannot be opened ({e}): "
            "name the storage"
        ) from e
    return Checkpoints(store, source.run_id, home)


class Checkpoint:
    """A checkpoint. Its manifest is read when it is first asked about.

    Args:
        store: Store that has it.
        storage_id: Its ID.
        header: Its header, or None if it was not written by det_core.
        on_deleted: Called with the ID of its run when it was deleted.

    Attributes:
        storage_id: ID.
    """

    def __init__(self, store: Store, storage_id: str, header: Header | None, on_deleted: Callable[[str], None]) -> None:
        self._store = store
        self._header = header
        self._on_deleted = on_deleted
        self.storage_id = storage_id

    def __repr__(self) -> str:
        return f"Checkpoint({self.storage_id!r}, run_id={self.run_id!r}, steps_completed={self.steps_completed!r})"

    @property
    def run_id(self) -> str | None:
        """ID of the run that wrote it; None if it was not written by det_core."""
        return self._header.run_id if self._header else None

    @property
    def restart(self) -> int | None:
        """Restart of the run that wrote it."""
        return self._header.restart if self._header else None

    @property
    def steps_completed(self) -> int | None:
        """Steps that were trained when it was saved."""
        if self._header is not None:
            return self._header.steps_completed
        steps = self.metadata.get("steps_completed")
        return steps if isinstance(steps, int) else None

    @property
    def time(self) -> float | None:
        """Time at which it was committed, in seconds since the epoch."""
        return commit_time(self._header) if self._header else None

    @property
    def verified(self) -> bool:
        """Whether it has a manifest to compare its files with. Checkpoints not written by det_core have none."""
        return self._stored.manifest.verified

    @property
    def resources(self) -> dict[str, int]:
        """Path to size in bytes, sorted; directories end in a slash and have size 0."""
        return self._stored.manifest.resources

    @property
    def files(self) -> int:
        """Number of its files."""
        return len(self._stored.manifest.files)

    @property
    def size(self) -> int:
        """Size of its files together, in bytes."""
        return sum(file.size for file in self._stored.manifest.files.values())

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Metadata saved with it.

        Raises:
            CheckpointCorrupt: If its metadata.json differs from the manifest.
        """
        return self._stored.metadata()

    @property
    def path(self) -> Path | None:
        """Its directory; None if it must be downloaded to be read."""
        return self._stored.path

    def download(
        self, folder: str | os.PathLike[str], *, selector: Selector | None = None, progress: Progress | None = None
    ) -> None:
        """Copy it into a directory, comparing every byte with the manifest. If it raises, the directory is unchanged.

        Args:
            folder: Directory, made if need be; other files in it stay.
            selector: Called with the paths of its files and directories; returns which to copy.
            progress: Called with the number of bytes copied since the last call.

        Raises:
            CheckpointCorrupt: If a file is missing or differs; the message names it.
            StorageError: If the store or the disk fails.
        """
        alone = RankGroup.alone("download")
        with self._store.read_lease(self.storage_id, Owner.current("client", 0)):
            stored = open_on_all(alone, self._store, self.storage_id)
            download(alone, self._store.disk, stored, os.path.abspath(os.fspath(folder)), selector, progress)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Compare every byte with the manifest; return the problems, a line for each damaged file.

        Of one without a manifest (:attr:`verified` is False) only the presence of its files is checked.

        Args:
            progress: Called with the number of bytes compared since the last call.

        Raises:
            CheckpointNotFound: If it was deleted meanwhile.
            StorageError: If the store fails. A single file that cannot be read is damaged.
        """
        problems: list[str] = []
        with self._store.read_lease(self.storage_id, Owner.current("client", 0)):
            # Opened anew: until the lease is held, it may have been deleted.
            stored = self._store.open(self.storage_id)
            names = iter(sorted(stored.manifest.files))
            # Together, as the store reads several files at a time: of one after the other each would wait for a reply.
            while batch := list(islice(names, FILES_AT_A_TIME)):
                try:
                    stored.check(batch, progress=progress)
                except (CheckpointCorrupt, StorageError):
                    problems.extend(_damaged_files(stored, batch))
            if not problems:
                try:
                    stored.metadata()
                except CheckpointCorrupt as e:
                    problems.append(str(e))
        return problems

    def delete(self) -> None:
        """Delete it, and record that in the journal of its run. It leaves the lists before its files go.

        Doing it again changes nothing.

        Raises:
            StorageError: If the store fails.
        """
        self._store.delete(self.storage_id)
        if self.run_id is not None:
            self._on_deleted(self.run_id)

    @cached_property
    def _stored(self) -> StoredCheckpoint:
        return self._store.open(self.storage_id)


class Checkpoints:
    """The complete checkpoints of a store, of one run or of all. Oldest first within a run; looked up at each use.

    ``with`` closes the connections to a cloud store at the end, as :meth:`close` does.

    Attributes:
        run_id: ID of the run; None: every run that the store has checkpoints of.
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
        """Return a checkpoint by its ID, by the beginning of it, or as ``latest``.

        Raises:
            CheckpointNotFound: If none has that ID, or several begin with it.
        """
        headers = {header.storage_id: header for header in self._headers()}
        if storage_id == LATEST and headers:
            return self._checkpoint(*list(headers.items())[-1])
        matches = match_id(storage_id, headers)
        if len(matches) > 1:
            raise CheckpointNotFound(ambiguous_id(storage_id, matches, "checkpoints"))
        if matches:
            return self._checkpoint(matches[0], headers[matches[0]])
        # One of another run, or that det_core did not write, by its whole ID.
        try:
            return self._checkpoint(storage_id, self._store.open(storage_id).manifest.header)
        except CheckpointNotFound as e:
            place = self.root
            if self.run_id:
                place = f"run {self.run_id} in {self.root}"
            raise CheckpointNotFound(
                f"no checkpoint {storage_id!r} of {place}; `det-core checkpoint list` shows those there are"
            ) from e

    @property
    def root(self) -> str:
        """Location of the store."""
        return self._store.root

    @property
    def in_use(self) -> set[str]:
        """Storage IDs of those that a process reads now."""
        return self._store.in_use()

    def damaged(self) -> dict[str, str]:
        """Return those that runs kept here have registered, and that are not listed for their unusable manifests.

        Returns:
            Storage ID to problem.

        Raises:
            StorageError: If the store cannot be listed.
        """
        listed = {header.storage_id for header in self._headers()}
        problems = {}
        for folder in self._run_folders():
            for storage_id in registered(read_run(folder)) - listed:
                try:
                    self._store.open(storage_id)
                except CheckpointNotFound:
                    continue
                except (CheckpointCorrupt, StorageError) as e:
                    problems[storage_id] = _text(e)
        return problems

    def run_ids(self) -> list[str]:
        """Return the IDs of runs that it has checkpoints of, sorted."""
        return sorted({header.run_id for header in self._headers()})

    def of_run(self, run_id: str) -> Checkpoints:
        """Return those of one run in the same store, by its whole ID."""
        return Checkpoints(self._store, run_id, self._home)

    def preview_gc(self, policy: RetentionPolicy) -> list[RetentionDecision]:
        """Return what a policy would keep and delete, and why; each run is evaluated alone.

        Raises:
            StorageError: If the store fails.
        """
        return [decision for run_id in self._runs() for decision in self._retention(policy, run_id).evaluate_all()]

    def metrics(self) -> list[str]:
        """Return the names of the validation metrics of its runs that are kept here, sorted; ``a.b`` for b within a."""
        rows = (row for folder in self._run_folders() for row in read_run(folder).iter_rows(VALIDATION_GROUP))
        return sorted({name for row in rows for name in spread(row.metrics)})

    def gc(
        self,
        policy: RetentionPolicy,
        deleted: Callable[[str], None] = lambda storage_id: None,
        *,
        judged: Iterable[RetentionDecision] | None = None,
    ) -> list[str]:
        """Delete what a policy does not keep, oldest first, and files of dead writers; each run is evaluated alone.

        A checkpoint that cannot be deleted is logged as a warning, and stays. So does one that the policy has come to
        keep, as another process has deleted others since the preview.

        Args:
            policy: Policy, such as ``core.KeepLatest(3) | core.KeepBest(1, "loss")``.
            deleted: Called with the storage ID of each that was deleted.
            judged: Result of :meth:`preview_gc` for this policy. Checkpoints committed since are left alone then.
                Defaults to a new one.

        Returns:
            The storage IDs of those that were deleted.

        Raises:
            StorageError: If the store cannot be listed.
        """
        if judged is None:
            judged = self.preview_gc(policy)
        doomed: dict[str, set[str]] = {}
        for decision in judged:
            if not decision.reasons:
                doomed.setdefault(decision.candidate.run_id, set()).add(decision.candidate.storage_id)
        all_deleted: list[str] = []
        for run_id, storage_ids in doomed.items():
            of_run = self._retention(policy, run_id, deleted).delete(storage_ids)
            if of_run:
                self._record_deletion(run_id, of_run)
            all_deleted += of_run
        self._store.collect()
        return all_deleted

    def close(self) -> None:
        """Close connections, if there are any; a later call makes new ones."""
        self._store.close()

    def _checkpoint(self, storage_id: str, header: Header | None) -> Checkpoint:
        return Checkpoint(self._store, storage_id, header, lambda run_id: self._record_deletion(run_id, [storage_id]))

    def _headers(self) -> list[Header]:
        return self._store.list(self.run_id)

    def _runs(self) -> list[str]:
        if self.run_id is None:
            return self.run_ids()
        return [self.run_id]

    def _run_folders(self) -> list[Path]:
        folders = (run_folder(run_id, self._home) for run_id in self._runs())
        return [folder for folder in folders if folder is not None]

    def _retention(
        self, policy: RetentionPolicy, run_id: str, deleted: Callable[[str], None] = lambda storage_id: None
    ) -> Retention:
        folder = run_folder(run_id, self._home)
        return Retention(policy, self._store, run_id, folder=folder, deleted=lambda gone, _left: deleted(gone))

    def _record_deletion(self, run_id: str, storage_ids: list[str]) -> None:
        """Record in a run's journal that checkpoints are deleted, unless it is being written or not kept here."""
        folder = run_folder(run_id, self._home)
        if folder is None:
            return
        try:
            with lock_run(folder):
                restart = max(RunSummary(folder).starts - 1, 0)
                with closing(Journal(folder, run_id=run_id, restart=restart, rank=0)) as journal:
                    for storage_id in storage_ids:
                        journal.record("checkpoint_deleted", {"storage_id": storage_id, "resources": {}})
        # The files are gone: an outdated record must not make the deletion look failed.
        except RunLocked:
            logger.warning("run %s is running, so its record still names what was deleted", run_id)
        except (RunError, OSError) as e:
            logger.warning("the journal of run %s still names what was deleted: %s", run_id, e)


@contextmanager
def open_checkpoint(settings: Any, storage_id: str, owner: str) -> Iterator[Checkpoint]:
    """Yield a checkpoint of a storage.

    Args:
        settings: Storage, as ``core.init(checkpoint_storage=)`` takes it.
        storage_id: Whole ID of the checkpoint.
        owner: Whose checkpoints these are, for the error.

    Raises:
        CheckpointError: If the storage cannot be opened here.
        CheckpointNotFound: If it does not have the checkpoint.
    """
    try:
        store = open_store(settings, default=Path())
    except ValueError as e:
        raise CheckpointError(f"the checkpoints of {owner} cannot be reached from here: {e}") from e
    with Checkpoints(store, None, None) as several:
        yield several[storage_id]


def delete_run(run_id: str, home: Path | str | None = None, *, folder_only: bool = False) -> Path:
    """Delete a run: its directory, and its checkpoints and TensorBoard files in the storages that it was given.

    Of a trial of an experiment the directory alone is deleted: what is in storages belongs to the experiment.

    Args:
        run_id: ID, the beginning of one, or ``"latest"``.
        home: See :func:`det_core.client.runs`.
        folder_only: Whether to leave what lies in the storages that it was given (:attr:`Run.storages`).

    Returns:
        The directory that was deleted.

    Raises:
        RunNotFound: If no run has that name, or several begin with it.
        RunLocked: If a process is writing the run.
        RunError: If it could not be deleted; the message gives the reason. A second call goes on with the rest.
    """
    run = Run(find(run_id, home))
    storages = run.storages
    if folder_only:
        storages = []
    with lock_run(run.path), ExitStack() as stack:
        try:
            stores = [stack.enter_context(closing(open_store(storage, default=run.path))) for storage in storages]
            # Each is checked before the first is emptied: a refusal should leave the run whole.
            for store in stores:
                if used := sorted(store.in_use().intersection(header.storage_id for header in store.list(run.run_id))):
                    names = ", ".join(used)
                    raise RunError(f"run {run.run_id} was not deleted: a process is reading its checkpoint {names}")
            for store in stores:
                _delete_from(run, store, home)
        except (ValueError, CheckpointError, MissingExtra) as e:
            raise RunError(
                f"run {run.run_id} could not be deleted: {e}; to delete its folder alone: "
                f"det-core runs rm {run.run_id} --folder-only"
            ) from e
        # Last, as it has the record of the storages, which a second call needs.
        try:
            shutil.rmtree(run.path)
        except OSError as e:
            raise RunError(f"run {run.run_id} could not be deleted: {e}") from e
    return run.path


def _delete_from(run: Run, store: Store, home: Path | str | None) -> None:
    """Delete the run's checkpoints, damaged ones too, its event files, and unfinished ones."""
    storage_ids = [header.storage_id for header in store.list(run.run_id)]
    storage_ids += Checkpoints(store, run.run_id, home).damaged()
    for storage_id in storage_ids:
        store.delete(storage_id)
    store.remove_folder(event_files_of_run(run.run_id))
    # As the next start would: only files of earlier starts are collected.
    store.collect(Owner.current(run.run_id, run.restarts + 1))


def _parse(storage: Storage) -> Any:
    """Return the mapping if its JSON is given."""
    if not isinstance(storage, str) or not storage.lstrip().startswith("{"):
        return storage
    try:
        return json.loads(storage)
    except ValueError as e:
        raise ValueError(f"the storage {storage!r} begins like JSON, but is none: {e}") from e


def _run_in(store: Store, run: str, home: Path | str | None) -> str:
    """Return the ID of a run that is kept here, or that the store has checkpoints of."""
    try:
        return find(run, home).run_id
    except RunNotFound as e:
        run_ids = sorted({header.run_id for header in store.list()})
        # IDs begin with the time, so the last one is the newest.
        matches = run_ids[-1:] if run == LATEST else match_id(run, run_ids)
        if len(matches) == 1:
            return matches[0]
        present = "it has no checkpoints"
        if run_ids:
            present = f"it has checkpoints of {', '.join(run_ids[-5:])}"
        raise RunNotFound(f"{e}; nor has {store.root} any of one run of that name: {present}") from e


def _damaged_files(stored: StoredCheckpoint, names: Sequence[str]) -> Iterator[str]:
    """Yield the problem of each damaged file among these."""
    refusals = 0
    for name in names:
        try:
            stored.check([name])
            refusals = 0
        except CheckpointCorrupt as e:
            yield str(e)
        except StorageError as e:
            refusals += 1
            if refusals == MAX_REFUSALS:
                raise
            yield _text(e)


def _text(error: Exception) -> str:
    # The text of an OSError begins with its number, which means nothing for a store.
    return str(error.args[-1])
