"""A torch state as it is now, in an image of the file that ``torch.load`` will read."""

from __future__ import annotations

import copyreg
import ctypes
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


_MIXED = "one storage with two types"


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
        self._ids = _Ids()
        self._known: tuple[list[Name], list[int]] = [], []
        """The names and sizes of the storages of the last state: mostly they are those of the next."""
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
        known = pickler.names, pickler.sizes
        if known != self._known:
            self._storages, self._known = Archive(pickler.sizes), known
            self._archive = self._storages.with_pickle(len(pickled))
        elif len(pickled) != self._archive.pickle.size:
            self._archive = self._storages.with_pickle(len(pickled))
        archive = self._archive
        memory = self.image.memory(archive.end)
        if self._targets.memory is not memory:
            self._targets = _Targets(memory)
        self._targets.copy(pickler.storages, pickler.names, archive.records)
        memory[archive.pickle.start : archive.pickle.start + len(pickled)] = pickled
        return Contents(pickler.sizes, len(pickled))

    def _pickle(self, state: Any) -> tuple[_Pickler, bytes]:
        """The pickle of a state, and who made it."""
        while True:
            pickler = self._pickler()
            try:
                return pickler, pickler.result(state, self._ids)
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
        self._records: list[Record] = []
        self._small: list[tuple[int, int, int]] = []
        """Number, address and bytes of each storage that one thread copies."""
        self._large: list[tuple[int, torch.Tensor]] = []
        """Number and place of each that torch does."""

    def copy(self, storages: list[torch.UntypedStorage], names: list[Name], records: list[Record]) -> None:
        """Copy each storage to where its record is, from whatever device, and return when that is done.

        Args:
            storages: what is copied.
            names: what they are called; the same ones for the same ``records``.
            records: theirs, and maybe more behind them.
        """
        if records is not self._records:
            self._plan(names, records)
        move = ctypes.memmove
        for number, address, size in self._small:
            move(address, storages[number].data_ptr(), size)
        if self._large:
            self._copy_by_torch([storages[number] for number, _ in self._large])

    def _plan(self, names: list[Name], records: list[Record]) -> None:
        self._records, self._small, self._large = records, [], []
        for number, ((_, _, location, _), record) in enumerate(zip(names, records, strict=False)):
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


class _Hidden(Exception):
    """There is a storage outside of plain tensors."""


Name = tuple[str, int, str, int]
"""What a storage is called in a pickle: the class for which it stands, in ``torch``, its number, its location (as
``torch.load`` takes it) and its elements."""


class _Ids:
    """Persistent ids in opcodes. Those of the last state are kept, as mostly they are those of the next."""

    def __init__(self) -> None:
        self._names: list[Name] = []
        self._ids: list[bytes] = []

    def of(self, names: list[Name]) -> list[bytes]:
        """The ids of storages that are called so."""
        if names != self._names:
            self._names, self._ids = names, [_pickled(*name) for name in names]
        return self._ids


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

    def result(self, state: Any, known: _Ids) -> bytes:
        """The pickle."""
        self.dump(state)
        parts, ids = self._file.getvalue().split(self._mark), known.of(self.names)
        for i, part in enumerate(parts[:-1]):  # each ends with the opcode LONG1, a length, and the lower four bytes
            parts[i] = part[:-6] + ids[int.from_bytes(part[-4:], "little")]
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
        if known is None:
            number = self._add(storage, dtype, kind, storage.nbytes(), tensor.is_cpu)
        elif known[0] is dtype:
            number = known[1]
        else:
            raise Unusual(_MIXED)
        size = tuple(tensor.shape)
        args = (self._high | number, tensor.storage_offset(), size, tensor.stride(), tensor.requires_grad, None)
        return torch._utils._rebuild_tensor_v2, args

    def _add(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: str, size: int, on_host: bool) -> int:
        """The number of a storage, which it is given now."""
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
        known = self._known.get(storage._cdata)
        if known is not None and known[0] is not dtype:
            raise Unusual(_MIXED)
        on_host = storage.device.type == "cpu"
        number = known[1] if known else self._add(storage, dtype, kind, storage.nbytes(), on_host)
        kind, _, location, elements = self.names[number]
        return ("storage", getattr(torch, kind), str(number), location, elements)


def _refuse(storage: object) -> Any:
    raise _Hidden


_REFUSED = dict.fromkeys([torch.UntypedStorage, torch.storage.TypedStorage, *torch._storage_classes], _refuse)
_TYPES = {dtype: kind for dtype, kind in torch.storage._dtype_to_storage_type_map().items() if not kind.startswith("Q")}
"""The storages of tensors that are not quantized."""
