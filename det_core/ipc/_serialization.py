"""Serialization: Python objects to segments and back, by pickle protocol 5 with large buffers out of band.

Between processes of one node a segment of 1 MiB or more travels as a memory file (``memfd``): the sender copies it
once, whatever the number of receivers, and each receiver maps it privately. So a broadcast array is writable on every
rank, and a write stays private to that rank (copy on write).
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
"""Minimum size of a buffer outside the pickle: below, copying is cheaper than one more segment."""
MEMORY_FILE_BYTES = 1 << 20
"""Minimum size of a segment that travels as a memory file between processes of one node."""
MAX_FILES = 200
"""Maximum number of memory files per frame; further segments go in the stream.

The kernel passes at most 253 descriptors at once (SCM_MAX_FD)."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MemoryFile:
    """Sealed anonymous file in memory, closed when the last packet or segment that refers to it is dropped."""

    __slots__ = ("fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @classmethod
    def of(cls, data: Buffer) -> MemoryFile:
        """Return a new file with a copy of ``data``, the only copy for all receivers."""
        view = memoryview(data).cast("B")
        self = cls(os.memfd_create("det_core", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), len(view))
        done = 0
        # In turns: a write returns after 2 GiB at most, however much memory there is.
        while done < len(view):
            done += os.write(self.fd, view[done:])
        # Sealed, so that no receiver can change or shrink it: a mapped page that is cut off is a SIGBUS.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        return self

    def read(self) -> bytearray:
        """Return a copy of the bytes in this process's own memory."""
        data = bytearray(self.size)
        view = memoryview(data)
        done = 0
        while done < self.size:
            done += os.preadv(self.fd, [view[done:]], done)
        return data

    def __del__(self) -> None:
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


Segment = Buffer | MemoryFile
"""Bytes, or a received memory file that the chief forwards as it is."""


def size_of(segments: Sequence[Segment]) -> int:
    """Return the total size of the segments in bytes."""
    return sum(s.size if isinstance(s, MemoryFile) else memoryview(s).nbytes for s in segments)


# objects to segments


def dump(obj: Any) -> list[Segment]:
    """Pickle ``obj`` into segments: the pickle, then its large buffers (not copied).

    Raises:
        Exception: If ``obj`` cannot be pickled; nothing has been sent by then.
    """
    buffers: list[Segment] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # of an array that is not contiguous; pickle can copy it
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    # Only if the script has imported torch: otherwise there cannot be a tensor, and the import takes a second.
    torch = sys.modules.get("torch")
    if not hasattr(torch, "Tensor"):
        return [pickle.dumps(obj, protocol=5, buffer_callback=keep), *buffers]
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=keep)
    # torch's own __reduce_ex__ copies a tensor's bytes into the pickle, twice.
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}  # type: ignore[union-attr]
    pickler.dump(obj)
    return [stream.getvalue(), *buffers]


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and tensor.nbytes >= OUT_OF_BAND_BYTES
    )
    if not is_plain:
        return tensor.__reduce_ex__(5)
    try:
        raw = tensor.view(-1).view(torch.uint8).numpy()
    except RuntimeError:  # raised by a torch that was installed without NumPy
        return tensor.__reduce_ex__(5)
    return rebuild_tensor, (pickle.PickleBuffer(raw), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def rebuild_tensor(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return the tensor over the memory ``raw``; called by pickle."""
    import torch

    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)


def join_items(items: Sequence[Sequence[Segment]]) -> list[Segment]:
    """Join the segments of several objects to those of one frame, the result of an allgather.

    Small pickles become one segment, a pickle of their list; otherwise a table of counts comes first.
    """
    if all(len(item) == 1 for item in items) and size_of([item[0] for item in items]) < OUT_OF_BAND_BYTES:
        return [pickle.dumps([bytes(item[0]) for item in items], protocol=5)]  # type: ignore[arg-type]
    return [struct.pack(f"<{len(items)}I", *map(len, items)), *(s for item in items for s in item)]


# segments to objects


def split_items(segments: Sequence[Segment]) -> Sequence[Sequence[Segment]]:
    """Return the segments of each object; the inverse of ``join_items``."""
    table = segments[0]
    assert not isinstance(table, MemoryFile)
    if len(segments) == 1:
        return [(blob,) for blob in pickle.loads(table)]
    counts = struct.unpack(f"<{len(table) // 4}I", table)
    rest = iter(segments[1:])
    return [[next(rest) for _ in range(count)] for count in counts]


class Mapper:
    """Mapping of received memory files, for all channels of a communicator.

    Args:
        limit: maximum number of live mappings, each of which holds a descriptor; further files are copied.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def load(self, segments: Sequence[Segment]) -> Any:
        """Return the object that ``dump`` made these segments from."""
        if len(segments) == 1 and not isinstance(segments[0], MemoryFile):
            return pickle.loads(segments[0])
        first, *buffers = map(self._map, segments)
        return pickle.loads(first, buffers=buffers)

    def _map(self, segment: Segment) -> Buffer:
        if not isinstance(segment, MemoryFile):
            return segment
        if len(self._live) >= self._limit:
            return segment.read()
        try:
            mapping = mmap.mmap(segment.fd, segment.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # EMFILE: mmap duplicates the descriptor
            return segment.read()
        self._live.add(mapping)
        return memoryview(mapping)


# segments to bytes


class Packet:
    """Outgoing frame of a call, encoded once and copied once for all its receivers."""

    def __init__(self, op: Op, name: str, rank: int, number: int, kind: int, segments: Sequence[Segment]) -> None:
        self.size = size_of(segments)
        self.file_bytes = 0
        """Number of bytes that travel as memory files; known after ``local()``."""
        self._head = partial(encode_head, kind, op=op, name=name, rank=rank, number=number)
        self._segments = segments
        self._local: tuple[bytes, list[MemoryFile]] | None = None
        self._chunks: list[Any] | None = None

    def local(self) -> tuple[bytes, list[MemoryFile]]:
        """Return the form for a process of this node: the bytes, and the files to send with the first of them."""
        if self._local is None:
            buffers, files = self._encode(MAX_FILES)
            self._local = (b"".join(buffers), files)
            self.file_bytes = sum(file.size for file in files)
        return self._local

    def remote(self, chunk: int, copy: Callable[[Buffer], Any]) -> list[Any]:
        """Return the form for another node: the head, then the segments' bytes in parts.

        Args:
            chunk: maximum size of a part in bytes.
            copy: called once with the bytes of each part; its results are sent to all receivers.
        """
        if self._chunks is None:
            head, *views = (memoryview(buffer).cast("B") for buffer in self._encode(0)[0])
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
            if isinstance(segment, MemoryFile):
                segment = segment.read()
            if gap := -end % ALIGNMENT:
                inline.append(bytes(gap))
            inline.append(segment)
            lengths.append(memoryview(segment).nbytes)
            end += gap + lengths[-1]
        return [self._head(lengths=lengths), *inline], files


def _to_memory_file(segment: Segment) -> Segment:
    """Return a large segment as a memory file, or unchanged if the process lacks a descriptor or memory for one."""
    if isinstance(segment, MemoryFile) or memoryview(segment).nbytes < MEMORY_FILE_BYTES:
        return segment
    try:
        return MemoryFile.of(segment)
    except OSError:
        return segment


def cut_body(lengths: Sequence[int], body: bytearray, files: Iterator[MemoryFile]) -> list[Segment]:
    """Cut a received frame's inline bytes into segments, with its memory files in their places between them."""
    view = memoryview(body)
    at = 0
    segments: list[Segment] = []
    for length in lengths:
        if length & IN_MEMORY_FILE:
            file = next(files)
            # The kernel passed the descriptor alone; its size stands in the table.
            file.size = length ^ IN_MEMORY_FILE
            segments.append(file)
        else:
            at += -at % ALIGNMENT
            segments.append(view[at : at + length])
            at += length
    return segments
