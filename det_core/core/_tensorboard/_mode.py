"""Which event files are written and kept: by us (AUTO) or by the script (MANUAL)."""

from __future__ import annotations

import enum
import importlib.util
import logging
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


class Tensorboard:
    """The event files of one rank.

    Args:
        mode: see :class:`TensorboardMode`.
        local: this rank's folder for event files.
        kept: copies a file to where they are kept, given its name there; None: ``local`` is itself kept with the
            run.
        where: how messages name that place.
        rank: this rank.
    """

    def __init__(self, mode: TensorboardMode, *, local: Path, kept: Put | None, where: str, rank: int) -> None:
        self._mode = mode
        self._local = local
        self._kept = kept
        self._where = where
        self._rank = rank
        self._made: Copies | None = None
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._writer: EventWriter | None = None
        self.writes = mode is TensorboardMode.AUTO and rank == 0
        """Whether :meth:`scalars` is to be called here."""

    def folder(self) -> Path:
        """This rank's folder, made on first use."""
        self._local.mkdir(parents=True, exist_ok=True)
        return self._local

    def scalars(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Write one row; what is no number is left out."""
        with self._lock:
            if self._writer is None:
                from det_core.core._tensorboard._writer import EventWriter

                self._writer = EventWriter(self.folder())
            self._writer.scalars(group, steps, metrics)

    def sync(self) -> None:
        """Bring the copy up to date, in the mode AUTO."""
        if self._writer is None:
            return
        self._writer.flush()
        if self._kept is not None:
            with self._syncing:  # checkpoints are committed in a thread of their own
                self._copies().sync(self._local)

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
        if self._writer is None:
            return
        try:
            self.sync()
        finally:
            writer, self._writer, self.writes = self._writer, None, False
            writer.close()
