"""Context directory: the files that are packed, and the errors for those that cannot be."""

from __future__ import annotations

import os
from base64 import b64decode
from pathlib import Path

import pytest

from det_core.client import _pack
from det_core.client._pack import pack


def write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def packed(root: Path, home: Path | None = None) -> list[str]:
    return [entry["path"] for entry in pack(root, home)]


def test_files_travel_with_content_and_mode(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "sub/run.sh")
    (tmp_path / "sub/run.sh").chmod(0o755)
    entries = {entry["path"]: entry for entry in pack(tmp_path)}
    assert list(entries) == ["sub", "sub/run.sh", "train.py"]
    assert b64decode(entries["sub/run.sh"]["content"]) == b"sub/run.sh"
    assert (entries["sub/run.sh"]["mode"], entries["sub/run.sh"]["type"]) == (0o755, 48)
    assert entries["sub"]["type"] == 53


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
    (root / "round").symlink_to(root)
    (root / "broken").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    assert packed(root) == ["lib.py", "libs", "libs/lib.py", "train.py"]


def test_a_folder_that_is_too_large_says_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pack, "LIMIT", 1000)
    write(tmp_path, "train.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/big.bin").write_bytes(bytes(2000))
    with pytest.raises(ValueError, match=r"the most is in data .*\.detignore"):
        pack(tmp_path)
    (tmp_path / ".detignore").write_text("data\n")
    assert packed(tmp_path) == ["train.py"]


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        pack(tmp_path / "nothing")
    write(tmp_path, "file")
    with pytest.raises(ValueError, match="is no folder"):
        pack(tmp_path / "file")
