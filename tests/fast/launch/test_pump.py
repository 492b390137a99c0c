"""The thread that carries output: slow, closed and full readers, and ranks that share one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from det_core.launch._wrapper._pump import Pump, Stream


def pump_to(target: int, folder: Path, prefix: bytes = b"[rank=0] ") -> tuple[Pump, int]:
    source, end = os.pipe()
    stream = Stream(source, target, prefix, str(folder))
    pump = Pump([stream])
    pump.start()
    return pump, end


def close(pump: Pump) -> None:
    pump.join()
    assert not pump.is_alive()
    pump.close()


def test_a_full_disk_loses_lines_and_counts_them_but_blocks_nobody(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    pump, end = pump_to(full, tmp_path)
    with os.fdopen(end, "wb") as out:
        out.write(b"x" * 200_000 + b"\n")
    close(pump)
    os.close(full)
    assert pump.lost == 200_001 + len(b"[rank=0] ")
    assert pump.failure is None


def test_it_ends_though_another_process_still_holds_the_pipe(tmp_path: Path) -> None:
    file = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    pump, end = pump_to(file, tmp_path)
    os.write(end, b"one\ntwo")
    pump.finish()
    close(pump)
    os.close(end)
    assert os.pread(file, 1000, 0) == b"[rank=0] one\n[rank=0] two\n"
    assert pump.tail(1) == b"[rank=0] two\n"
    assert pump.tail(0) == b""
    os.close(file)


def test_a_descriptor_that_does_not_block_is_written_in_full(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    pump, end = pump_to(write, tmp_path)
    got = bytearray()

    def reader() -> None:
        while not got.endswith(b"end\n"):
            got.extend(os.read(read, 4096))

    thread = threading.Thread(target=reader)
    thread.start()
    with os.fdopen(end, "wb") as out:
        out.write(b"y" * 3_000_000 + b"\nend\n")
    close(pump)
    thread.join()
    os.close(read)
    os.close(write)
    assert bytes(got) == b"[rank=0] " + b"y" * 3_000_000 + b"\n[rank=0] end\n"


def test_the_last_lines_are_there_in_whatever_pieces_they_came(tmp_path: Path) -> None:
    """One by one, faster than the thread looks, and in one piece that is more than it keeps."""
    file = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    pump, end = pump_to(file, tmp_path)
    lines = [b"%d" % number * (number % 40 + 1) + b"\n" for number in range(20_000)]
    for line in lines[:3000]:
        os.write(end, line)
    with os.fdopen(end, "wb") as out:
        out.write(b"".join(lines[3000:]))
    close(pump)
    expected = [b"[rank=0] " + line for line in lines]
    size = os.fstat(file).st_size
    assert os.pread(file, size, 0) == b"".join(expected)
    assert pump.tail(500) == b"".join(expected[-500:])
    assert len(pump.tail(len(lines))) == 64 * 1024
    os.close(file)
