"""The pickle of a state as ``torch.save`` makes it, with tensors pickled all at once."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

PROTOCOL = 2
"""As ``torch.save``."""


class Unusual(Exception):
    """Only ``torch.save`` itself can tell what becomes of it."""


class Layout(NamedTuple):
    """What is known of storages, in the order of their numbers."""

    sizes: list[int]
    """Bytes."""
    locations: list[str]
    """As ``torch.load`` takes them."""


class Pickled(NamedTuple):
    """A state, but for the bytes of its storages."""

    data: bytes
    storages: list[torch.UntypedStorage]
    layout: Layout


class Pickling:
    """Pickles one state after the other. Nothing of them is kept but what tensors look like.

    C's pickler calls Python for every tensor, and for every object if storages are to have persistent ids. So here the
    tensors are first only noted; then all are looked at, each property of all of them in turn; and what each becomes
    is put into the pickle by its opcodes (see :mod:`pickletools`), which mostly are those of the state before.
    """

    def __init__(self) -> None:
        self._opcodes = _Opcodes(_Looks([], [], [], [], []))
        self._pickler = _Pickler()
        self._thorough = False

    def pickle(self, state: Any) -> Pickled:
        """Pickle a state.

        Raises:
            Unusual: this is not the way for it.
            Exception: something in it cannot be pickled.
        """
        if not self._thorough:
            try:
                return self._fast(state)
            except _Special:
                self._thorough = True
        return _ThoroughPickler().result(state)

    def _fast(self, state: Any) -> Pickled:
        parts, tensors = self._pickler.pickle(state)
        looks, storages = _look(tensors, self._opcodes.looks)
        if looks != self._opcodes.looks:
            self._opcodes = _Opcodes(looks)
        whole: list[bytes] = [b""] * (2 * len(parts) - 1)
        whole[::2], whole[1::2] = parts, self._opcodes.arguments
        return Pickled(b"".join(whole), storages, self._opcodes.layout)


class _Special(Exception):
    """There is a storage outside of a plain tensor, or a tensor that is not plain."""


class _Looks(NamedTuple):
    """What tensors look like: all that their opcodes depend on, one entry a tensor."""

    traits: list[tuple[torch.dtype, torch.device, torch.layout, bool, torch.Size]]
    offsets: list[int]
    strides: list[tuple[int, ...]]
    numbers: list[int]
    """Of their storages."""
    sizes: list[int]
    """The bytes of each storage."""


_traits = attrgetter("dtype", "device", "layout", "requires_grad", "shape")
_attributes = attrgetter("__dict__")
_hooks = attrgetter("_backward_hooks")
_address = attrgetter("_cdata")


def _look(tensors: list[torch.Tensor], known: _Looks) -> tuple[_Looks, list[torch.UntypedStorage]]:
    """What plain tensors look like, and their storages in the order in which they are first met."""
    traits = list(map(_traits, tensors))
    if traits != known.traits and not all(map(_plain, traits)):
        raise _Special
    if any(map(_attributes, tensors)) or any(map(_hooks, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        raise _Special
    all_storages = list(map(torch.Tensor.untyped_storage, tensors))
    addresses = list(map(_address, all_storages))
    storages = dict(zip(addresses, all_storages, strict=True))
    numbers = {address: number for number, address in enumerate(storages)}
    looks = _Looks(
        traits,
        list(map(torch.Tensor.storage_offset, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(numbers.__getitem__, addresses)),
        list(map(torch.UntypedStorage.nbytes, storages.values())),
    )
    return looks, list(storages.values())


def _plain(traits: tuple[torch.dtype, torch.device, torch.layout, bool, torch.Size]) -> bool:
    dtype, device, layout, _, _ = traits
    return dtype in _KINDS and device.type in ("cpu", "cuda") and layout is torch.strided


class _Opcodes:
    """What tensors that look so become in a pickle.

    Attributes:
        looks: what they look like.
        arguments: the tuple of arguments of ``torch._utils._rebuild_tensor_v2`` for each.
        layout: of their storages.
    """

    def __init__(self, looks: _Looks) -> None:
        self.looks = looks
        self.layout = Layout(looks.sizes, [""] * len(looks.sizes))
        types: list[torch.dtype | None] = [None] * len(looks.sizes)
        self.arguments = [self._of(types, *look) for look in zip(*looks[:-1], strict=True)]

    def _of(self, types: list[torch.dtype | None], traits: Any, offset: int, stride: Any, number: int) -> bytes:
        dtype, device, _, requires_grad, shape = traits
        if types[number] is None:
            types[number], self.layout.locations[number] = dtype, str(device)
        elif types[number] is not dtype:
            raise Unusual(_MIXED)
        elements = self.layout.sizes[number] // dtype.itemsize
        storage = _storage(_KINDS[dtype], number, self.layout.locations[number], elements)
        grad = b"\x88" if requires_grad else b"\x89"
        return b"(" + storage + _int(offset) + _tuple(shape) + _tuple(stride) + grad + b"Nt"


_MIXED = "one storage with two types"


def _storage(kind: str, number: int, location: str, elements: int) -> bytes:
    """A storage, named by its persistent id."""
    found = getattr(torch, kind)
    stands_for = f"c{found.__module__}\n{found.__qualname__}\n".encode()
    named = (_text(str(number)), _text(location), _int(elements))
    return b"(" + _text("storage") + stands_for + b"".join(named) + b"tQ"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(number: int) -> bytes:
    return pickle.dumps(number, PROTOCOL)[2:-1]


def _tuple(numbers: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"


class _Pickler(pickle.Pickler):
    """Notes plain tensors, and puts a mark in the place of the arguments that rebuild each. For one state at a time."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, PROTOCOL)
        self._registered: dict[type, Callable[[Any], Any]] = {}
        self._tensors: list[torch.Tensor] = []
        data = os.urandom(7) + b"\x40"
        self._number = int.from_bytes(data, "little")  # which no state has
        self._mark = b"\x8a\x08" + data + b"\x85"  # LONG1, TUPLE1

    def pickle(self, state: Any) -> tuple[list[bytes], list[torch.Tensor]]:
        """The pickle of a state, cut where the arguments of its plain tensors belong; and those."""
        if self._registered != copyreg.dispatch_table or not self._registered:
            self._registered = dict(copyreg.dispatch_table)
            self.dispatch_table = {**self._registered, **_REFUSED, torch.Tensor: self._note}
        try:
            self.dump(state)
            return self._file.getvalue().split(self._mark), self._tensors
        finally:
            self.clear_memo()
            self._tensors = []
            self._file.seek(0)
            self._file.truncate()

    def _note(self, tensor: torch.Tensor) -> Any:
        self._tensors.append(tensor)
        return torch._utils._rebuild_tensor_v2, (self._number,)


class _ThoroughPickler(pickle.Pickler):
    """As slow as ``torch.save``: finds storages wherever they are, and leaves each tensor to torch."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, PROTOCOL)
        self._storages: list[torch.UntypedStorage] = []
        self._layout = Layout([], [])
        self._known: dict[int, tuple[torch.dtype, int]] = {}

    def result(self, state: Any) -> Pickled:
        """The state."""
        self.dump(state)
        return Pickled(self._file.getvalue(), self._storages, self._layout)

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
        known, number = self._known.setdefault(storage._cdata, (dtype, len(self._storages)))
        if known is not dtype:
            raise Unusual(_MIXED)
        if number == len(self._storages):
            self._storages.append(storage)
            self._layout.sizes.append(storage.nbytes())
            self._layout.locations.append(torch.serialization.location_tag(storage))
        elements = self._layout.sizes[number] // dtype.itemsize
        return ("storage", getattr(torch, kind), str(number), self._layout.locations[number], elements)


def _refuse(storage: object) -> Any:
    raise _Special


_REFUSED = dict.fromkeys([torch.UntypedStorage, torch.storage.TypedStorage, *torch._storage_classes], _refuse)
_KINDS = {
    dtype: kind
    for dtype, kind in torch.storage._dtype_to_storage_type_map().items()
    if not kind.startswith("Q") and not dtype.is_complex
}
"""The class that stands for storages, by the type of plain tensors: not quantized, and never conjugated in place."""
