"""Which event files are written and kept: by us (AUTO) or by the script (MANUAL)."""

from __future__ import annotations

import enum
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._optional import install_command

if TYPE_CHECKING:
    from det_core.core._tensorboard._sync import Copies, Put
    from det_core.core._tensorboard._writer import EventWriter

logger = logging.getLogger("det_core.core")


class TensorboardMode(enum.Enum):
    """How TensorBoard files are handled."""

    AUTO = "AUTO"
    """The chief writes every reported metric to an event file and keeps a copy beside the checkpoints."""
    MANUAL = "MANUAL"
    """The script writes its own, and copies them with ``upload_tensorboard_files()``."""


def chosen_mode(mode: TensorboardMode | None) -> TensorboardMode:
    """The mode that ``core.init(tensorboard_mode=)`` means on this machine.

    Left out, it is AUTO where the extra is installed. AUTO without the extra is MANUAL, with a warning.
    """
    if mode is TensorboardMode.MANUAL or installed():
        return mode or TensorboardMode.AUTO
    if mode is TensorboardMode.AUTO:
        logger.warning(
            "no event files are written: %s, or ask for TensorboardMode.MANUAL", install_command("tensorboard")
        )
    return TensorboardMode.MANUAL


def installed() -> bool:
    """Whether the extra is; a mere folder of that name beside the script is not."""
    found = importlib.util.find_spec("tensorboard")
    return found is not None and found.origin is not None


def has_events(folder: Path) -> bool:
    """Whether there are event files in a folder; one that cannot be read holds none that TensorBoard shows."""
    try:
        return any("tfevents" in name for name in os.listdir(folder))
    except OSError:
        return False


class Tensorboard:
    """The event files of one rank: those that are written here, and those of a writer of the script's beside them.

    Args:
        mode: see :class:`TensorboardMode`.
        local: this rank's folder for event files.
        kept: copies a file to where they are kept, given its name there; None: ``local`` is itself kept with the
            run.
        where: how messages name that place.
        rank: this rank.
        steps_completed: where this session starts.
    """

    def __init__(
        self,
        mode: TensorboardMode,
        *,
        local: Path,
        kept: Put | None,
        where: str,
        rank: int,
        steps_completed: int = 0,
    ) -> None:
        self._mode = mode
        self._local = local
        self._kept = kept
        self._where = where
        self._rank = rank
        self._steps_completed = steps_completed
        self._older = has_events(local)
        self._warned = False
        self._made: Copies | None = None
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._writer: EventWriter | None = None
        self.writes = mode is TensorboardMode.AUTO and rank == 0
        """Whether :meth:`scalars` is to be called here."""

    def folder(self) -> Path:
        """This rank's folder, made on first use."""
        self._local.mkdir(parents=True, exist_ok=True)
        if self._older and self.writes:
            # The mark that this session starts has to stand before what the script's own writer is about to write
            # here: TensorBoard reads file after file, and drops what it has read when it comes to the mark.
            with self._lock:
                self._open_writer().begin(self._steps_completed + 1)
                self._open_writer().flush()
            self._older = False
        return self._local

    def scalars(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Write one row; what is no number is left out."""
        with self._lock:
            self._open_writer().scalars(group, steps, metrics)

    def points(self, steps: int, values: Mapping[str, Any]) -> None:
        """Write one point to each tag, in whichever mode."""
        writer = self._writer
        if writer is None:
            if not installed():
                if not self._warned:
                    self._warned = True
                    logger.warning("no event files are written: %s", install_command("tensorboard"))
                return
            with self._lock:
                writer = self._open_writer()
        writer.points(steps, values)

    def _open_writer(self) -> EventWriter:
        if self._writer is None:
            from det_core.core._tensorboard._writer import EventWriter

            self._local.mkdir(parents=True, exist_ok=True)
            self._writer = EventWriter(self._local, older=self._older)
        return self._writer

    def sync(self) -> None:
        """Bring the copy up to date, in the mode AUTO: with a checkpoint, and at the end."""
        if self._mode is TensorboardMode.AUTO and self._rank == 0:
            self.ship()

    def ship(self) -> None:
        """Bring the copy up to date with all that is in the folder now, whoever has written it."""
        writer = self._writer
        if writer is not None:
            writer.flush()
        if self._kept is not None and self._local.is_dir():
            with self._syncing:  # checkpoints are committed in a thread of their own
                self._copies().sync(self._local, f"rank-{self._rank}/" if self._rank else "")

    def upload(self, selector: Callable[[Path], bool], mangler: Callable[[Path, int], Path]) -> None:
        """Copy selected files, in the mode MANUAL."""
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError(
                "upload_tensorboard_files() is for core.init(tensorboard_mode=TensorboardMode.MANUAL); "
                "in the mode AUTO files are copied without it"
            )
        self._copies().upload(self.folder(), self._rank, selector, mangler)

    def _copies(self) -> Copies:
        from det_core.core._tensorboard._sync import Copies, copies_in

        if self._made is None:
            place = self._local.parent / "uploaded"
            self._made = copies_in(place) if self._kept is None else Copies(self._kept, self._where)
        return self._made

    def close(self) -> None:
        """Write what is left, copy it, and close the file."""
        try:
            self.sync()
        finally:
            writer, self._writer, self.writes = self._writer, None, False
            if writer is not None:
                writer.close()
