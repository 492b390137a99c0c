"""Python objects to segments and back: pickle protocol 5, with large buffers kept out of the pickle.

Between processes of one machine a segment of 1 MiB or more travels as a memory file (``memfd``): the sender copies it
once, whatever the number of receivers, and each receiver maps it privately. So a broadcast array is writable on every
rank, a write stays private to that rank (copy on write), and nothing is left behind when a process is killed: the
memory belongs to whoever maps it.
"""

from __future__ import annotations

import copyreg
import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from det_core.ipc._frames import ALIGNMENT, IN_MEMORY_FILE, Buffer, Op, encode_head

OUT_OF_BAND_BYTES = 1 << 16
"""Bytes from which a buffer leaves the pickle: below, copying is cheaper than one more segment."""
MEMORY_FILE_BYTES = 1 << 20
"""Bytes from which a segment travels as a memory file between processes of one machine."""
MAX_FILES = 200
"""Memory files per frame (the kernel passes at most 253 descriptors at once); further segments go in the stream."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MemoryFile:
    """A sealed anonymous file in memory. Closed when the last packet or mapping that refers to it is dropped."""

    __slots__ = ("fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @classmethod
    def of(cls, data: Buffer) -> MemoryFile:
        """A new file with the bytes of ``data``: the one copy."""
        view = memoryview(data).cast("B")
        self = cls(os.memfd_create("det_core", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), len(view))
        done = 0
        while done < len(view):
            done += os.write(self.fd, view[done:])
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        return self

    def read(self) -> bytearray:
        """The bytes, copied into memory of our own."""
        data = bytearray(self.size)
        view, done = memoryview(data), 0
        while done < self.size:
            done += os.preadv(self.fd, [view[done:]], done)
        return data

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


Segment = Buffer | MemoryFile
"""A segment on its way: bytes, or a memory file that was received and is passed on."""


def size_of(segments: Sequence[Segment]) -> int:
    """How many bytes the segments have together."""
    return sum(s.size if isinstance(s, MemoryFile) else memoryview(s).nbytes for s in segments)


# objects to segments


def dump(obj: Any) -> list[Segment]:
    """Pickle ``obj`` into segments: the pickle, then its large buffers (not copied).

    Raises whatever pickling raises; nothing has been sent by then.
    """
    buffers: list[Segment] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    torch = sys.modules.get("torch")
    if not hasattr(torch, "Tensor"):
        return [pickle.dumps(obj, protocol=5, buffer_callback=keep), *buffers]
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=keep)
    # torch's own pickling copies a tensor's bytes into the pickle, twice
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}  # type: ignore[union-attr]
    pickler.dump(obj)
    return [out.getvalue(), *buffers]


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and tensor.nbytes >= OUT_OF_BAND_BYTES
    )
    if not plain:
        return tensor.__reduce_ex__(5)
    try:
        raw = tensor.view(-1).view(torch.uint8).numpy()
    except RuntimeError:  # torch without numpy
        return tensor.__reduce_ex__(5)
    return rebuild_tensor, (pickle.PickleBuffer(raw), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def rebuild_tensor(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """The tensor over the memory ``raw``: called by pickle."""
    import torch

    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)


def join_items(items: Sequence[Sequence[Segment]]) -> list[Segment]:
    """The segments of several objects as the segments of one frame (the result of an allgather).

    Several small pickles become one segment, a pickle of their list; else a table of counts comes first.
    """
    if all(len(item) == 1 for item in items) and size_of([item[0] for item in items]) < OUT_OF_BAND_BYTES:
        return [pickle.dumps([bytes(item[0]) for item in items], protocol=5)]  # type: ignore[arg-type]
    return [struct.pack(f"<{len(items)}I", *map(len, items)), *(s for item in items for s in item)]


# segments to objects


def split_items(segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
    """The inverse of ``join_items``."""
    table = segments[0]
    assert not isinstance(table, MemoryFile)
    if len(segments) == 1:
        return [(blob,) for blob in pickle.loads(table)]
    counts, rest = struct.unpack(f"<{len(table) // 4}I", table), iter(segments[1:])
    return [[next(rest) for _ in range(count)] for count in counts]


class Mapper:
    """Maps received memory files; every mapping holds a descriptor, so beyond ``limit`` live ones it copies instead."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def load(self, segments: Sequence[Segment]) -> Any:
        """The object that ``dump`` made these segments from."""
        if len(segments) == 1 and not isinstance(segments[0], MemoryFile):
            return pickle.loads(segments[0])
        first, *buffers = (self._map(s) if isinstance(s, MemoryFile) else s for s in segments)
        return pickle.loads(first, buffers=buffers)

    def _map(self, file: MemoryFile) -> Buffer:
        if len(self._live) >= self._limit:
            return file.read()
        try:
            mapping = mmap.mmap(file.fd, file.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # no descriptor left for it
            return file.read()
        self._live.add(mapping)
        return memoryview(mapping)


# segments to bytes


class Packet:
    """A call's frame on its way out, encoded once and copied once for all its receivers."""

    def __init__(self, op: Op, name: str, rank: int, number: int, kind: int, segments: Sequence[Segment]) -> None:
        self.size = size_of(segments)
        self.file_bytes = 0
        """How many bytes travel as memory files; known after ``local()``."""
        self._head = partial(encode_head, kind, op=op, name=name, rank=rank, number=number)
        self._segments = segments
        self._local: tuple[bytes, list[MemoryFile]] | None = None
        self._chunks: list[Any] | None = None

    def local(self) -> tuple[bytes, list[MemoryFile]]:
        """For a process of this machine: the bytes, and the files that go with the first of them."""
        if self._local is None:
            runs, files = self._encode(MAX_FILES)
            self._local = b"".join(runs), files
            self.file_bytes = sum(f.size for f in files)
        return self._local

    def remote(self, chunk: int, copy: Callable[[Buffer], Any]) -> list[Any]:
        """Return the parts for another machine: the head, then the segments' bytes, ``chunk`` at most in each.

        Args:
            chunk: maximum size of a part in bytes.
            copy: called once with the bytes of each part; all receivers get what it returns.
        """
        if self._chunks is None:
            head, *views = (memoryview(run).cast("B") for run in self._encode(0)[0])
            self._chunks = [copy(head)]
            self._chunks += [copy(view[i : i + chunk]) for view in views for i in range(0, view.nbytes, chunk)]
        return self._chunks

    def _encode(self, max_files: int) -> tuple[list[Buffer], list[MemoryFile]]:
        inline: list[Buffer] = []
        files: list[MemoryFile] = []
        lengths = []
        end = 0
        for segment in self._segments:
            if len(files) < max_files:
                segment = _to_memory_file(segment)
                if isinstance(segment, MemoryFile):
                    files.append(segment)
                    lengths.append(segment.size | IN_MEMORY_FILE)
                    continue
            run = segment.read() if isinstance(segment, MemoryFile) else segment
            if gap := -end % ALIGNMENT:
                inline.append(bytes(gap))
            inline.append(run)
            lengths.append(memoryview(run).nbytes)
            end += gap + lengths[-1]
        return [self._head(lengths=lengths), *inline], files


def _to_memory_file(segment: Segment) -> Segment:
    """A large segment as a memory file, unless the process has no descriptor or memory left for one."""
    if isinstance(segment, MemoryFile) or memoryview(segment).nbytes < MEMORY_FILE_BYTES:
        return segment
    try:
        return MemoryFile.of(segment)
    except OSError:
        return segment


def cut_body(lengths: Sequence[int], body: bytearray, files: Iterator[MemoryFile]) -> list[Segment]:
    """Cut a received frame's inline bytes into segments and put its memory files where they belong."""
    view, at = memoryview(body), 0
    out: list[Segment] = []
    for length in lengths:
        if length & IN_MEMORY_FILE:
            file = next(files)
            file.size = length ^ IN_MEMORY_FILE
            out.append(file)
        else:
            at += -at % ALIGNMENT
            out.append(view[at : at + length])
            at += length
    return out
