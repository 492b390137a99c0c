"""Objects to segments and back, and the memory files they travel in."""

from __future__ import annotations

import os
import resource
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.ipc._frames import Kind, Op
from det_core.ipc._payload import IN_FILE_FROM, Mapper, MemoryFile, Packet, dump, join_items, split_items


@given(st.lists(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=8), max_size=5))
def test_items_survive_being_joined(objects: list[Any]) -> None:
    joined = join_items([dump(o) for o in objects])
    assert [Mapper().load(item) for item in split_items(joined)] == objects


def test_small_buffers_stay_in_the_pickle_and_large_ones_do_not() -> None:
    assert len(dump(np.zeros(100))) == 1
    assert len(dump([np.zeros(1 << 16), np.zeros(1 << 17)])) == 3


def test_an_array_that_is_not_contiguous_is_pickled_whole() -> None:
    array = np.arange(1 << 18).reshape(512, 512)[:, ::2]
    assert np.array_equal(Mapper().load(dump(array)), array)


def test_a_mapped_array_is_equal_and_writable_and_private() -> None:
    array = np.arange(IN_FILE_FROM // 4, dtype=np.int64)
    runs, files = Packet(Kind.CALL, Op.broadcast, "user", 0, 1, dump(array)).local()
    assert len(files) == 1 and sum(memoryview(r).nbytes for r in runs) < 1000
    pickled = dump(array)[0]
    one, two = (Mapper().load([pickled, *files]) for _ in range(2))
    one[0] = -1
    assert two[0] == 0 and array[0] == 0
    assert np.array_equal(two, array)


def test_a_memory_file_cannot_be_changed_after_it_was_sent() -> None:
    file = MemoryFile.of(b"x" * 100)
    with pytest.raises(PermissionError):
        os.write(file.fd, b"y")
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 10)


def test_many_live_mappings_are_copied_instead_so_that_descriptors_do_not_run_out() -> None:
    mapper, file = Mapper(limit=3), MemoryFile.of(b"x" * 5000)
    before = len(os.listdir("/proc/self/fd"))
    kept = [mapper.open([file])[0] for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) - before == 3
    assert all(bytes(k) == b"x" * 5000 for k in kept)
    del kept
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_descriptor_to_spare_large_segments_are_copied() -> None:
    segments = dump(np.arange(IN_FILE_FROM // 8 + 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    file = MemoryFile.of(b"x" * 5000)
    used = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        with pytest.raises(OSError):
            while True:
                fillers.append(os.dup(0))
        runs, files = Packet(Kind.CALL, Op.broadcast, "user", 0, 1, segments).local()
        copied = Mapper().open([file])[0]
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files == [] and sum(memoryview(r).nbytes for r in runs) > IN_FILE_FROM
    assert bytes(copied) == b"x" * 5000


def test_a_packet_for_another_machine_holds_copies() -> None:
    array = np.arange(1 << 18)
    packet = Packet(Kind.CALL, Op.broadcast, "user", 0, 1, dump(array))
    parts = packet.remote(1 << 16)
    array[:] = 0
    assert max(map(len, parts)) <= 1 << 16
    assert np.array_equal(np.frombuffer(b"".join(parts)[-array.nbytes :], np.int64), np.arange(1 << 18))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_large_tensors_travel_out_of_band(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = (torch.arange(1 << 18) % 2).to(getattr(torch, dtype)).view(4, -1)
    segments = dump({"weights": tensor, "again": tensor, "name": "x"})
    assert len(segments) == 2 and len(memoryview(segments[0])) < 1000  # type: ignore[arg-type]
    files = [MemoryFile.of(s) for s in segments[1:]]  # type: ignore[arg-type]
    back = Mapper().load([segments[0], *files])
    assert torch.equal(back["weights"], tensor) and back["weights"].dtype is tensor.dtype
    assert back["again"] is back["weights"]
    back["weights"][0, 0] = 1
    assert tensor[0, 0] == 0


@pytest.mark.parametrize("kind", ["small", "slice", "gradient", "sparse", "conjugate", "parameter", "module"])
def test_other_tensors_travel_as_torch_pickles_them(kind: str) -> None:
    torch = pytest.importorskip("torch")
    large = torch.arange(1 << 18, dtype=torch.float32)
    made = {
        "small": large[:10].clone(),
        "slice": large.view(512, 512)[:, ::2],
        "gradient": large.clone().requires_grad_(),
        "sparse": large.view(512, 512).to_sparse(),
        "conjugate": torch.complex(large, large).conj(),
        "parameter": torch.nn.Parameter(large),
        "module": torch.nn.Linear(300, 300),
    }[kind]
    back = Mapper().load(dump(made))
    if kind == "module":
        assert all(
            torch.equal(a, b) and b.requires_grad for a, b in zip(made.parameters(), back.parameters(), strict=True)
        )
    else:
        one, two = (t.to_dense() if kind == "sparse" else t for t in (made, back))
        assert torch.equal(one, two) and type(back) is type(made) and back.requires_grad == made.requires_grad
