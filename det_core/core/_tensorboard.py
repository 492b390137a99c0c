"""TensorBoard event files of one rank, and their copies in the checkpoint storage."""

from __future__ import annotations

import enum
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from det_core._optional import install_command
from det_core._standalone.files import STAGING_SUFFIX, replacing
from det_core.core._event_writer import EventWriter, is_installed
from det_core.errors import TensorboardError
from det_core.journal import Cursor

logger = logging.getLogger("det_core.core")

Put = Callable[[Path, str], None]
"""Function that copies a local file to a relative POSIX path, replacing the file there atomically."""


class TensorboardMode(enum.Enum):
    """Handling of TensorBoard event files."""

    AUTO = "AUTO"
    """The chief writes every metric that it reports to an event file, and copies it to the checkpoint storage."""
    MANUAL = "MANUAL"
    """The script writes event files, and copies them with ``upload_tensorboard_files()``."""


def resolve_mode(mode: TensorboardMode | None) -> TensorboardMode:
    """Return the mode to use for ``core.init(tensorboard_mode=)`` on this machine.

    Defaults to AUTO if the extra is installed. AUTO without the extra becomes MANUAL, with a warning.
    """
    if mode is TensorboardMode.MANUAL or is_installed():
        return mode or TensorboardMode.AUTO
    if mode is TensorboardMode.AUTO:
        logger.warning("no event files are written: %s, or use TensorboardMode.MANUAL", install_command("tensorboard"))
    return TensorboardMode.MANUAL


class TensorboardFiles:
    """Event files of one rank: those written here, and those of a user-defined writer in the same directory.

    Args:
        mode: see :class:`TensorboardMode`.
        journals: opens the journals of this rank, oldest first; the last one is this process's.
        flush_journal: writes pending reports to the journal's file, as far as the disk takes them.
        local: directory of this rank's event files.
        put: copies a file to the storage under a name; None if ``local`` itself is stored with the run.
        where: the storage, for messages.
        rank: this rank.
        is_resumed: whether an earlier session may have stored event files there.
        start_step: returns the step at which this session starts.

    Attributes:
        enabled: whether reports of this rank are written to an event file.
    """

    def __init__(
        self,
        mode: TensorboardMode,
        *,
        journals: Callable[[], list[Cursor]],
        flush_journal: Callable[[], None],
        local: Path,
        put: Put | None,
        where: str,
        rank: int,
        is_resumed: bool = False,
        start_step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._mode = mode
        self._flush_journal = flush_journal
        self._local = local
        self._put = put
        self._where = where
        self._rank = rank
        self._start_step = start_step
        self.enabled = mode is TensorboardMode.AUTO and rank == 0
        self._needs_session_start = self.enabled
        self._writer = EventWriter(local, journals() if self.enabled else (), is_resumed=is_resumed)
        self._copied: dict[Path, tuple[int, int]] = {}
        # Checkpoints are committed in a thread, which copies event files beside the script's sync_tensorboard().
        self._copying = threading.Lock()

    def start(self) -> None:
        """Start to write reports to the event file."""
        self._writer.start()

    def add_scalars(self, steps: int, values: Mapping[str, Any]) -> None:
        """Write a point for each tag, in either mode; ignore values other than numbers. Never raises."""
        self._writer.add(steps, values)

    def directory(self) -> Path:
        """Return this rank's directory, created on first use."""
        self._local.mkdir(parents=True, exist_ok=True)
        if self._needs_session_start:
            # The mark of this session must precede what the script's own writer is about to write here: TensorBoard
            # reads file after file, and drops what it has read when it comes to a mark.
            self._needs_session_start = False
            self._writer.mark_session(self._start_step() + 1)
        return self._local

    def sync(self) -> None:
        """Upload changed event files in the mode AUTO, for a checkpoint."""
        if self.enabled:
            self.upload_changed()

    def upload_changed(self) -> None:
        """Upload changed event files, also those of other writers in the directory.

        Raises:
            TensorboardError: If a file cannot be read or copied; the message names it.
        """
        if self.enabled:
            self._flush_journal()
        self._writer.flush()
        self._copy_changed()

    def upload(self, selector: Callable[[Path], bool], mangler: Callable[[Path, int], Path]) -> None:
        """Copy the files that ``selector`` selects under the names that ``mangler`` returns, in the mode MANUAL.

        Raises:
            RuntimeError: In the mode AUTO.
            ValueError: If ``mangler`` returns an absolute path, one that leads upwards, or the same path for two files;
                nothing is copied then.
            TensorboardError: As :meth:`upload_changed`.
        """
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError(
                "upload_tensorboard_files() requires core.init(tensorboard_mode=TensorboardMode.MANUAL); "
                "in the mode AUTO files are copied without it"
            )
        plan: dict[str, Path] = {}
        for path in filter(selector, _files(self.directory())):
            target = _target_name(mangler(path, self._rank), path)
            if target in plan:
                raise ValueError(f"mangler returned {target!r} for both {str(plan[target])!r} and {str(path)!r}")
            plan[target] = path
        for target, path in plan.items():
            self._copy(path, target)

    def close(self) -> None:
        """Write what is missing, copy it, and close the file.

        An error of the disk or the store is a warning: the record of the run is complete without the copy.
        """
        was_enabled = self.enabled
        self.enabled = False
        if was_enabled:
            self._flush_journal()
        # A writer that hangs in the disk would hang the copy, too.
        if self._writer.close() and was_enabled:
            try:
                self._copy_changed()
            except OSError as e:
                logger.warning("event files were not copied, and stay in %s: %s", self._local, e)

    def _copy_changed(self) -> None:
        """Copy the files whose size or modification time has changed since they were copied."""
        if self._put is None:
            return
        prefix = f"rank-{self._rank}/" if self._rank else ""
        with self._copying:
            for path in _files(self._local):
                try:
                    status = (self._local / path).stat()
                except FileNotFoundError:
                    continue
                state = (status.st_size, status.st_mtime_ns)
                if self._copied.get(path) != state:
                    self._copy(path, prefix + path.as_posix())
                    # The state before the copy: a file that grew meanwhile is copied again.
                    self._copied[path] = state

    def _copy(self, path: Path, name: str) -> None:
        put = self._put
        where = self._where
        if put is None:
            uploaded = self._local.parent / "uploaded"
            put = _put_into(uploaded)
            where = str(uploaded)
        try:
            put(self._local / path, name)
        except OSError as e:
            raise TensorboardError(f"copying {self._local / path} to {where}/{name}: {e.strerror or e}") from e


def _files(source: Path) -> Iterator[Path]:
    """Iterate over the files below a directory, relative to it, sorted by name; over none if it does not exist."""
    for directory, directories, names in os.walk(source):
        directories.sort()
        for name in sorted(names):
            path = Path(directory, name)
            if not name.endswith(STAGING_SUFFIX) and path.is_file():
                yield path.relative_to(source)


def _target_name(mangled: Path | str, path: Path) -> str:
    target = PurePosixPath(os.path.normpath(mangled))
    if target.is_absolute() or target.parts[:1] in ((), ("..",)):
        raise ValueError(f"mangler returned {str(mangled)!r} for {str(path)!r}: expected a path inside the destination")
    return str(target)


def _put_into(directory: Path) -> Put:
    """Return a function that copies into a directory of this machine."""

    def put(source: Path, name: str) -> None:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=False) as staging:
            shutil.copyfile(source, staging)

    return put
