"""A torch state as it is now, in an image of the file that ``torch.load`` will read."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from det_core.core._checkpoint._aside._archive import Archive, Record
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents
from det_core.core._checkpoint._aside._pickling import Layout, Pickling, Unusual

log = logging.getLogger("det_core.checkpoint")
SMALL = 256 << 10
"""Bytes that one thread copies faster than torch has begun to."""


class Snapshots:
    """Takes one snapshot after the other into one image.

    Everything that is no storage of a tensor is pickled; of each storage, whichever tensors share it, the bytes are
    copied to their place in the image. Nothing of the state is kept.

    Args:
        image: the memory.
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self._pickling = Pickling()
        self._layout = Layout([], [])
        """Of the storages of the last state: mostly it is that of the next."""
        self._storages = Archive(())
        self._archive = self._storages.with_pickle(0)
        self._targets = _Targets(bytearray(1))

    def take(self, state: Any) -> Contents | None:
        """Have the image hold ``state``; on return it may be changed.

        Returns:
            what the image holds; None: only ``torch.save`` itself can tell what becomes of the state.

        Raises:
            Exception: something in it cannot be pickled.
        """
        try:
            pickled, storages, layout = self._pickling.pickle(state)
        except Unusual as e:
            log.debug("torch.save itself has to save this state: %s", e)
            return None
        if layout != self._layout:
            self._storages, self._layout = Archive(layout.sizes), layout
            self._archive = self._storages.with_pickle(len(pickled))
        elif len(pickled) != self._archive.pickle.size:
            self._archive = self._storages.with_pickle(len(pickled))
        archive = self._archive
        memory = self.image.memory(archive.end)
        if self._targets.memory is not memory:
            self._targets = _Targets(memory)
        self._targets.copy(storages, layout, archive.records)
        start = archive.pickle.start
        memory[start : start + len(pickled)] = pickled
        return Contents(layout.sizes, len(pickled))

    def put(self, file: memoryview) -> Contents:
        """Have the image hold a whole file."""
        memory = self.image.memory(len(file))
        memory[: len(file)] = file
        return Contents([], 0, len(file))

    def close(self) -> None:
        """Give the memory back."""
        self._targets = _Targets(bytearray(1))
        self.image.close()


class _Targets:
    """Memory that storages are copied to."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._whole.data_ptr()
        self._records: list[Record] = []
        self._small: list[tuple[int, int, int]] = []
        """Number, address and bytes of each storage that one thread copies."""
        self._large: list[tuple[int, torch.Tensor]] = []
        """Number and place of each that torch does."""

    def copy(self, storages: list[torch.UntypedStorage], layout: Layout, records: list[Record]) -> None:
        """Copy each storage to where its record is, from whatever device, and return when that is done.

        Args:
            storages: what is copied.
            layout: theirs; the same one for the same ``records``.
            records: theirs, and maybe more behind them.
        """
        if records is not self._records:
            self._plan(layout, records)
        move = ctypes.memmove
        for number, address, size in self._small:
            move(address, storages[number].data_ptr(), size)
        if self._large:
            self._copy_by_torch([storages[number] for number, _ in self._large])

    def _plan(self, layout: Layout, records: list[Record]) -> None:
        self._records, self._small, self._large = records, [], []
        for number, (location, record) in enumerate(zip(layout.locations, records, strict=False)):
            if record.size <= SMALL and location == "cpu":
                self._small.append((number, self._address + record.start, record.size))
            else:
                self._large.append((number, self._whole[record.start : record.start + record.size]))

    def _copy_by_torch(self, storages: list[torch.UntypedStorage]) -> None:
        sources = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
        with torch.no_grad():
            torch._foreach_copy_([target for _, target in self._large], sources, non_blocking=True)
        for device in {storage.device for storage in storages}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
