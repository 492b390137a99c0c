"""TensorBoard's event files: which are written here, and how all of them are kept beside the checkpoints."""

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
"""Copies one local file to a relative POSIX path, in place of what is there, in one step."""


class TensorboardMode(enum.Enum):
    """How TensorBoard files are handled."""

    AUTO = "AUTO"
    """The chief writes every metric that it reports to an event file and keeps a copy beside the checkpoints."""
    MANUAL = "MANUAL"
    """The script writes its own, and copies them with ``upload_tensorboard_files()``."""


def resolve_mode(mode: TensorboardMode | None) -> TensorboardMode:
    """The mode that ``core.init(tensorboard_mode=)`` means on this machine.

    Left out, it is AUTO where the extra is installed. AUTO without the extra is MANUAL, with a warning.
    """
    if mode is TensorboardMode.MANUAL or is_installed():
        return mode or TensorboardMode.AUTO
    if mode is TensorboardMode.AUTO:
        logger.warning(
            "no event files are written: %s, or ask for TensorboardMode.MANUAL", install_command("tensorboard")
        )
    return TensorboardMode.MANUAL


class TensorboardFiles:
    """The event files of one rank: those that are written here, and those of a writer of the script's beside them.

    Args:
        mode: see :class:`TensorboardMode`.
        journals: opens the journals of this rank, oldest first, the last of them that of this process.
        flush_journal: brings what was reported into the journal's file, as far as it can be.
        local: this rank's folder for event files.
        put: copies a file to where they are kept, given its name there; None: ``local`` is itself kept with the run.
        where: how messages name that place.
        rank: this rank.
        is_resumed: whether an earlier session may have kept event files there.
        start_step: returns the step that this session starts at.

    Attributes:
        draws: whether :meth:`draw` is to be called here with reports.
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
        self.enabled = self._unmarked = mode is TensorboardMode.AUTO and rank == 0
        self._writer = EventWriter(local, journals() if self.enabled else (), is_resumed=is_resumed)
        self._copied: dict[Path, tuple[int, int]] = {}
        self._copying = threading.Lock()  # checkpoints are committed in a thread of their own

    def start(self) -> None:
        """Have what is reported drawn, from now on."""
        self._writer.start()

    def add_scalars(self, steps: int, values: Mapping[str, Any]) -> None:
        """Draw one point for each tag, in whichever mode; what is no number is left out. Never raises."""
        self._writer.add(steps, values)

    def folder(self) -> Path:
        """This rank's folder, made on first use."""
        self._local.mkdir(parents=True, exist_ok=True)
        if self._unmarked:
            # The mark that this session starts has to stand before what the script's own writer is about to write
            # here: TensorBoard reads file after file, and drops what it has read when it comes to the mark.
            self._unmarked = False
            self._writer.mark_session(self._start_step() + 1)
        return self._local

    def sync(self) -> None:
        """As :meth:`upload_changed`, in the mode AUTO alone: with a checkpoint."""
        if self.enabled:
            self.upload_changed()

    def upload_changed(self) -> None:
        """Bring the copy up to date with all that is in the folder now, whoever has written it.

        Raises:
            TensorboardError: a file cannot be read or copied; the message names it.
        """
        if self.enabled:
            self._flush_journal()
        self._writer.flush()
        self._copy_changed()

    def upload(self, selector: Callable[[Path], bool], mangler: Callable[[Path, int], Path]) -> None:
        """Copy the files that ``selector`` chooses to the names that ``mangler`` gives, in the mode MANUAL.

        Raises:
            RuntimeError: in the mode AUTO.
            ValueError: ``mangler`` returns an absolute path, one that leads upwards, or the same path for two files.
                Nothing has been copied then.
            TensorboardError: as :meth:`upload_changed`.
        """
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError(
                "upload_tensorboard_files() is for core.init(tensorboard_mode=TensorboardMode.MANUAL); "
                "in the mode AUTO files are copied without it"
            )
        plan: dict[str, Path] = {}
        for path in filter(selector, _files(self.folder())):
            target = _inside(mangler(path, self._rank), path)
            if target in plan:
                raise ValueError(f"mangler gives {target!r} for both {str(plan[target])!r} and {str(path)!r}")
            plan[target] = path
        for target, path in plan.items():
            self._copy(path, target)

    def close(self) -> None:
        """Draw what is left, copy it, and close the file.

        Never raises for a disk or a store that refuses: the run's record is whole, so that is a warning.
        """
        draws, self.enabled = self.enabled, False
        if draws:
            self._flush_journal()
        if self._writer.close() and draws:  # one that hangs in the disk would hang the copy, too
            try:
                self._copy_changed()
            except OSError as e:
                logger.warning("event files were not copied, and stay in %s: %s", self._local, e)

    def _copy_changed(self) -> None:
        """Copy the files whose size or time of change is another one than when they were copied last."""
        if self._put is None:
            return
        below = f"rank-{self._rank}/" if self._rank else ""
        with self._copying:
            for path in _files(self._local):
                try:
                    found = (self._local / path).stat()
                except FileNotFoundError:
                    continue
                state = (found.st_size, found.st_mtime_ns)
                if self._copied.get(path) != state:
                    self._copy(path, below + path.as_posix())
                    self._copied[path] = state  # from before: a file that has grown meanwhile is copied again

    def _copy(self, path: Path, name: str) -> None:
        where = self._local.parent / "uploaded"
        put, place = (_putter(where), where) if self._put is None else (self._put, self._where)
        try:
            put(self._local / path, name)
        except OSError as e:
            raise TensorboardError(f"copying {self._local / path} to {place}/{name}: {e.strerror or e}") from e


def _files(source: Path) -> Iterator[Path]:
    """The files below a folder, relative to it, in the order of their names; none if it is not there."""
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if not name.endswith(STAGING_SUFFIX) and path.is_file():
                yield path.relative_to(source)


def _inside(mangled: Path | str, path: Path) -> str:
    target = PurePosixPath(os.path.normpath(mangled))
    if target.is_absolute() or target.parts[:1] in ((), ("..",)):
        raise ValueError(f"mangler gives {str(mangled)!r} for {str(path)!r}: expected a path inside the destination")
    return str(target)


def _putter(folder: Path) -> Put:
    """Copies into a folder of this machine."""

    def put(source: Path, name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=False) as staging:
            shutil.copyfile(source, staging)

    return put
