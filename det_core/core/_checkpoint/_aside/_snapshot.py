"""A torch state as it is now, in an image of the file that ``torch.load`` will read."""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from det_core.core._checkpoint._aside._archive import Archive, Record
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents

PROTOCOL = 2
"""As ``torch.save``."""
SMALL = 256 << 10
"""Bytes that one thread copies faster than torch has begun to."""


class Unusual(Exception):
    """Only ``torch.save`` itself can tell what becomes of it."""


class Snapshots:
    """Takes one snapshot after the other into one image.

    Everything that is no storage of a tensor is pickled; of each storage, whichever tensors share it, the bytes are
    copied to their place in the image. Nothing of the state is kept.

    Args:
        image: the memory.
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self._archive = Archive(())
        self._sizes: list[int] = []
        self._targets = _Targets(bytearray(1))

    def take(self, state: Any) -> Contents:
        """Have the image hold ``state``; on return it may be changed.

        Raises:
            Unusual: this is not the way for it.
            Exception: something in it cannot be pickled.
        """
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(state)
        pickled = file.getbuffer()
        sizes = [storage.nbytes() for storage in pickler.storages]
        if sizes != self._sizes:  # mostly they are those of the last time
            self._archive, self._sizes = Archive(sizes), sizes
        archive = self._archive.with_pickle(len(pickled))
        memory = self.image.memory(archive.end)
        if self._targets.memory is not memory:
            self._targets = _Targets(memory)
        self._targets.copy(pickler.storages, archive.records)
        memory[archive.pickle.start : archive.pickle.start + len(pickled)] = pickled
        return Contents(sizes, len(pickled))

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

    def copy(self, storages: list[torch.UntypedStorage], records: list[Record]) -> None:
        """Copy each storage to where its record is, from whatever device, and return when that is done."""
        targets, sources, devices = [], [], set()
        for storage, record in zip(storages, records, strict=False):
            if record.size <= SMALL and storage.device.type == "cpu":
                ctypes.memmove(self._address + record.start, storage.data_ptr(), record.size)
            else:
                targets.append(self._whole[record.start : record.start + record.size])
                sources.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
                devices.add(storage.device)
        if not targets:
            return
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class _Stored:
    """Stands in a pickle for a storage."""

    __slots__ = ("pid",)

    def __init__(self, pid: tuple[object, ...]) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and keeps the storages that it meets, in the order of their numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, PROTOCOL)
        self.dispatch_table: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, torch.Tensor: self._reduce}
        self.storages: list[torch.UntypedStorage] = []
        self._stored: dict[int, tuple[object, _Stored]] = {}
        self._storages = {torch.UntypedStorage, torch.storage.TypedStorage, *torch._storage_classes}
        self._types = torch.storage._dtype_to_storage_type_map()

    def persistent_id(self, obj: Any) -> Any:
        """How a storage is named."""
        kind = type(obj)
        if kind is _Stored:
            return obj.pid
        if kind not in self._storages:
            return None
        if kind is torch.UntypedStorage:
            return self._store(obj, torch.uint8, kind, obj.nbytes()).pid
        if kind is not torch.storage.TypedStorage:
            raise Unusual(f"a storage of type {kind.__name__}")
        storage = obj._untyped_storage
        return self._store(storage, obj.dtype, getattr(torch, obj._pickle_storage_type()), obj._size()).pid

    def _reduce(self, tensor: torch.Tensor) -> Any:
        """What ``Tensor.__reduce_ex__`` makes of a plain tensor, in a tenth of the time."""
        dtype = tensor.dtype
        name = self._types.get(dtype)
        if (
            name is None or tensor.__dict__ or tensor.layout is not torch.strided or tensor.device.type not in _PLAIN
            or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks
        ):  # fmt: skip
            return tensor.__reduce_ex__(PROTOCOL)
        storage = tensor.untyped_storage()
        stored = self._store(storage, dtype, getattr(torch, name), storage.nbytes() // dtype.itemsize)
        args = (stored, tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad, None)
        return torch._utils._rebuild_tensor_v2, args

    def _store(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: type, count: int) -> _Stored:
        known = self._stored.get(storage._cdata)
        if known is not None:
            if known[0] is not dtype:
                raise Unusual("one storage with two types")
            return known[1]
        device = storage.device
        location = "cpu" if device.type == "cpu" else torch.serialization.location_tag(storage)
        stored = _Stored(("storage", kind, str(len(self.storages)), location, count))
        self._stored[storage._cdata] = dtype, stored
        self.storages.append(storage)
        return stored


_PLAIN = ("cpu", "cuda")
