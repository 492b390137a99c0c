"""A torch state as it is now, in an image of the file that ``torch.load`` will read."""

from __future__ import annotations

import copyreg
import ctypes
import functools
import io
import os
import pickle
import struct
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
        self._sizes: list[int] = []
        self._storages = self._archive = Archive(()).with_pickle(0)
        self._targets = _Targets(bytearray(1))
        self._pickler: type[_Pickler] = _Pickler

    def take(self, state: Any) -> Contents:
        """Have the image hold ``state``; on return it may be changed.

        Raises:
            Unusual: this is not the way for it.
            Exception: something in it cannot be pickled.
        """
        pickler, pickled = self._pickle(state)
        sizes, archive = pickler.sizes, self._archive
        if sizes != self._sizes or len(pickled) != archive.pickle.size:  # mostly they are those of the last time
            if sizes != self._sizes:
                self._storages, self._sizes = Archive(sizes), sizes
            archive = self._archive = self._storages.with_pickle(len(pickled))
        memory = self.image.memory(archive.end)
        if self._targets.memory is not memory:
            self._targets = _Targets(memory)
        self._targets.copy(pickler.storages, pickler.names, archive.records)
        memory[archive.pickle.start : archive.pickle.start + len(pickled)] = pickled
        return Contents(sizes, len(pickled))

    def _pickle(self, state: Any) -> tuple[_Pickler, bytes]:
        """The pickle of a state, and who made it."""
        while True:
            pickler = self._pickler()
            try:
                return pickler, pickler.result(state)
            except _Hidden:
                self._pickler = _ThoroughPickler

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

    def copy(self, storages: list[torch.UntypedStorage], names: list[Name], records: list[Record]) -> None:
        """Copy each storage to where its record is, from whatever device, and return when that is done."""
        targets, sources, devices = [], [], set()
        for storage, (_, _, location, _), record in zip(storages, names, records, strict=False):
            if record.size <= SMALL and location == "cpu":
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


class _Hidden(Exception):
    """There is a storage outside of plain tensors."""


Name = tuple[str, int, str, int]
"""What a storage is called in a pickle: the class for which it stands, in ``torch``, its number, its location (as
``torch.load`` takes it) and its elements."""


@functools.lru_cache(maxsize=1 << 14)
def _pickled(kind: str, number: int, location: str, elements: int) -> bytes:
    """A :data:`Name` as a persistent id, in opcodes that use no memo; see :mod:`pickletools`."""
    found = getattr(torch, kind)
    stands_for = f"c{found.__module__}\n{found.__qualname__}\n".encode()
    count = pickle.dumps(elements, PROTOCOL)[2:-1]
    return b"(" + _unicode("storage") + stands_for + _unicode(str(number)) + _unicode(location) + count + b"tQ"


def _unicode(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and keeps the storages that it meets, in the order of their numbers.

    Storages have persistent ids, for which C's pickler would ask for every object there is. So in their place it is
    given integers that no state has, and :meth:`result` puts the ids there.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, PROTOCOL)
        self.dispatch_table: dict[type, Callable[[Any], Any]] = {
            **copyreg.dispatch_table, **_REFUSED, torch.Tensor: self._reduce,
        }  # fmt: skip
        self.storages: list[torch.UntypedStorage] = []
        self.sizes: list[int] = []
        """Bytes of each."""
        self.names: list[Name] = []
        self._known: dict[int, tuple[object, int]] = {}
        self._mark = os.urandom(7) + b"\x40"
        self._high = int.from_bytes(self._mark, "little") << 32

    def result(self, state: Any) -> bytes:
        """The pickle."""
        self.dump(state)
        parts = self._file.getvalue().split(self._mark)
        for i, part in enumerate(parts[:-1]):  # each ends with the opcode LONG1, a length, and the lower four bytes
            parts[i] = part[:-6] + _pickled(*self.names[int.from_bytes(part[-4:], "little")])
        return b"".join(parts)

    def _reduce(self, tensor: torch.Tensor) -> Any:
        """What ``Tensor.__reduce_ex__`` makes of a plain tensor, in a tenth of the time."""
        dtype = tensor.dtype
        kind = _TYPES.get(dtype)
        if (
            kind is None or not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided
            or tensor.__dict__ or tensor._backward_hooks or tensor.is_neg() or (dtype.is_complex and tensor.is_conj())
        ):  # fmt: skip
            return tensor.__reduce_ex__(PROTOCOL)
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0] is not dtype:
            number = self._number(storage, dtype, kind, storage.nbytes(), tensor.is_cpu)
        else:
            number = known[1]
        size = tuple(tensor.shape)
        args = (self._high | number, tensor.storage_offset(), size, tensor.stride(), tensor.requires_grad, None)
        return torch._utils._rebuild_tensor_v2, args

    def _number(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: str, size: int, on_host: bool) -> int:
        """The number of a storage, which it is given now if it has none."""
        known = self._known.get(storage._cdata)
        if known is not None:
            if known[0] is not dtype:
                raise Unusual("one storage with two types")
            return known[1]
        number = len(self.storages)
        location = "cpu" if on_host else torch.serialization.location_tag(storage)
        self.names.append((kind, number, location, size // dtype.itemsize))
        self.sizes.append(size)
        self._known[storage._cdata] = dtype, number
        self.storages.append(storage)
        return number


class _ThoroughPickler(_Pickler):
    """Finds storages that are not in a plain tensor, too."""

    def persistent_id(self, obj: Any) -> Any:
        """How a storage is named."""
        found = type(obj)
        if found not in _REFUSED:
            return None
        storage, dtype, kind = obj, torch.uint8, "UntypedStorage"
        if found is torch.storage.TypedStorage:
            storage, dtype, kind = obj._untyped_storage, obj.dtype, obj._pickle_storage_type()
        elif found is not torch.UntypedStorage:
            raise Unusual(f"a storage of type {found.__name__}")
        number = self._number(storage, dtype, kind, storage.nbytes(), storage.device.type == "cpu")
        kind, _, location, elements = self.names[number]
        return ("storage", getattr(torch, kind), str(number), location, elements)


def _refuse(storage: object) -> Any:
    raise _Hidden


_REFUSED = dict.fromkeys([torch.UntypedStorage, torch.storage.TypedStorage, *torch._storage_classes], _refuse)
_TYPES = {dtype: kind for dtype, kind in torch.storage._dtype_to_storage_type_map().items() if not kind.startswith("Q")}
"""The storages of tensors that are not quantized."""
