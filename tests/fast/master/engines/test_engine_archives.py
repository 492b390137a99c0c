"""Context archives: what comes in comes out, and nothing gets out of the folder or fills the disk."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest

from det_core.master._errors import Invalid, TooMuch
from det_core.master.engines import _archive, check_archive, pack_files, unpack_archive


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size, found.mode = kind, link, size, 0o644
    return found


def tgz(*members: tarfile.TarInfo) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(b"x" * one.size) if one.isreg() else None)
    return out


SYM, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
REFUSED = {
    "parent": [member("../out")],
    "parent within": [member("a/../../out")],
    "the directory itself": [member(".")],
    "link to an absolute path": [member("a", SYM, "/etc/passwd")],
    "link to the parent": [member("a", SYM, "../x")],
    "link deep": [member("d/e", SYM, "../../x")],
    "hard link out": [member("a", HARD, "../x")],
    "hard link to an absolute path": [member("a", HARD, "/etc/passwd")],
    "device": [member("a", tarfile.CHRTYPE)],
    "block device": [member("a", tarfile.BLKTYPE)],
    "pipe": [member("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_out_is_refused_and_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    source = tgz(*REFUSED[name])
    with pytest.raises(Invalid, match=REFUSED[name][-1].name.replace("..", r"\.\.")):
        check_archive(source)
    target = tmp_path / "in" / "target"
    target.mkdir(parents=True)
    with pytest.raises(Invalid):
        unpack_archive(source, target)
    assert list(target.iterdir()) == []
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "target"]


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    unpack_archive(
        tgz(member("d", tarfile.DIRTYPE), member("d/f", size=3), member("l", SYM, "d/f"), member("h", HARD, "d/f")),
        tmp_path,
    )
    assert (tmp_path / "l").read_text() == (tmp_path / "h").read_text() == "xxx"
    assert os.readlink(tmp_path / "l") == "d/f"


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    big = io.BytesIO()
    with gzip.GzipFile(fileobj=big, mode="wb") as f:  # 11 GiB that the header announces, and the file lacks
        f.write(member("zeros", size=11 << 30).tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(TooMuch, match="10 GiB"):
        check_archive(big)
    monkeypatch.setattr(_archive, "MAX_UNPACKED_BYTES", 5000)
    with pytest.raises(TooMuch):
        check_archive(tgz(member("a", size=3000), member("b", size=3000)))
    monkeypatch.setattr(_archive, "MAX_MEMBERS", 3)
    with pytest.raises(TooMuch, match="3 files"):
        check_archive(tgz(*(member(str(i)) for i in range(5))))
    monkeypatch.setattr(_archive, "MAX_PACKED_BYTES", 50)
    with pytest.raises(TooMuch, match="MB"):
        check_archive(tgz(member("a", size=3000)))


def test_a_header_that_would_fill_the_memory_is_refused() -> None:
    source = io.BytesIO()
    with gzip.GzipFile(fileobj=source, mode="wb") as f:
        f.write(member("pax", tarfile.XHDTYPE, size=8 << 30).tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(Invalid, match="header"):
        check_archive(source)


@pytest.mark.parametrize(
    "data",
    [b"", b"no archive", gzip.compress(b"no tar" * 1000), tgz(member("a", size=9999)).getvalue()[:60]],
    ids=["nothing", "text", "no tar", "cut short"],
)
def test_what_is_no_archive_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(Invalid, match="not a gzipped tar"):
        check_archive(io.BytesIO(data))


@pytest.mark.parametrize(
    "file",
    [
        {},
        {"path": ""},
        {"path": 3},
        {"path": "a", "content": "?"},
        {"path": "a", "type": "x"},
        {"path": "../a"},
        {"path": "."},
        {"path": "sub/.."},
        {"path": "a\0b"},
        {"path": "caf\udce9"},
        {"path": "a", "type": 50, "content": b64encode(b"/etc").decode()},
        {"path": "a", "type": 54},
        {"path": "a", "type": -1},
        {"path": "a", "mode": 1e400},
    ],
)
def test_files_that_cannot_be_used_are_refused(file: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        pack_files([file])
