"""Context directory: the files that are packed, and the errors for those that cannot be."""

from __future__ import annotations

import io
import os
import tarfile
from base64 import b64decode
from pathlib import Path

import pytest

from det_core.client import _pack
from det_core.client._pack import pack


def write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def opened(root: Path, home: Path | None = None) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(b64decode(pack(root, home))))


def packed(root: Path, home: Path | None = None) -> list[str]:
    return opened(root, home).getnames()


def test_files_travel_with_content_and_mode(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "sub/run.sh")
    (tmp_path / "sub/run.sh").chmod(0o755)
    with opened(tmp_path) as tar:
        assert tar.getnames() == ["sub", "sub/run.sh", "train.py"]
        script = tar.getmember("sub/run.sh")
        content = tar.extractfile(script)
        assert content is not None and content.read() == b"sub/run.sh"
        assert (script.mode, script.isreg()) == (0o755, True)
        assert tar.getmember("sub").isdir()


def test_file_whose_name_is_not_utf8_travels(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w"):
        assert [os.fsencode(name) for name in packed(tmp_path)] == [b"caf\xe9.txt"]


def test_detignore_names_what_stays(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "data/big.bin", "data/keep.txt", "logs/a.log", "sub/logs/b.log", "sub/x.log")
    (tmp_path / ".detignore").write_text("# comment\ndata/*\n!data/keep.txt\nlogs/\n*.log\n")
    assert packed(tmp_path) == ["data", "data/keep.txt", "sub", "train.py"]


def test_what_is_never_part_of_a_context_stays(tmp_path: Path) -> None:
    write(tmp_path, "train.py", ".git/HEAD", "pkg/__pycache__/a.pyc", "env/pyvenv.cfg", "env/bin/python", "home/runs/x")
    (tmp_path / "pkg/mod.py").write_text("")
    assert packed(tmp_path, tmp_path / "home") == ["pkg", "pkg/mod.py", "train.py"]
    assert "home/runs/x" in packed(tmp_path)


def test_links_travel_as_what_they_lead_to(tmp_path: Path) -> None:
    write(tmp_path, "outside/lib.py", "context/train.py")
    root = tmp_path / "context"
    (root / "lib.py").symlink_to(tmp_path / "outside/lib.py")
    (root / "libs").symlink_to(tmp_path / "outside")
    assert packed(root) == ["lib.py", "libs", "libs/lib.py", "train.py"]


def test_what_cannot_travel_is_left_out_with_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "context"
    write(root, "train.py")
    (root / "round").symlink_to(root)
    (root / "above").symlink_to("..")
    (root / "self").symlink_to("self")
    (root / "broken").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    assert packed(root) == ["train.py"]
    assert [record.getMessage() for record in caplog.records] == [
        "leaving 'above' out of the context: link to a directory that contains it",
        "leaving 'broken' out of the context: link to nothing",
        "leaving 'pipe' out of the context: not a regular file",
        "leaving 'round' out of the context: link to a directory that contains it",
        "leaving 'self' out of the context: link to nothing",
    ]


def test_directory_that_is_too_large_says_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pack, "MAX_BYTES", 1000)
    write(tmp_path, "train.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/big.bin").write_bytes(bytes(2000))
    with pytest.raises(ValueError, match=r"the most is in data .*\.detignore"):
        pack(tmp_path)
    (tmp_path / ".detignore").write_text("data\n")
    assert packed(tmp_path) == ["train.py"]


def test_context_that_is_not_a_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory not found"):
        pack(tmp_path / "nothing")
    write(tmp_path, "file")
    with pytest.raises(ValueError, match="is not a directory"):
        pack(tmp_path / "file")
