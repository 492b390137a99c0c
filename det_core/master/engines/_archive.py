"""Context archives: a folder's files as a gzipped tar, made from what a client sends, and unpacked for a trial.

An archive comes from outside: nothing in it may reach out of the folder that it is unpacked into, and nothing in it may
fill the disk or the memory.
"""

from __future__ import annotations

import gzip
import io
import os
import posixpath
import shutil
import tarfile
import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from det_core.master._errors import Invalid, TooMuch

MAX_PACKED = 95 << 20
"""Bytes of an archive."""
MAX_UNPACKED = 10 << 30
"""Bytes of all files in it."""
MAX_MEMBERS = 500_000
_MAX_HEADER = 1 << 20
_LONG_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"K")


class _Header(tarfile.TarInfo):
    """A header that is read into memory only if it is small."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _LONG_HEADERS and found.size > _MAX_HEADER:
            raise Invalid(f"the context archive has a header of {found.size} bytes")
        return found


def pack_files(files: Sequence[Mapping[str, Any]]) -> bytes:
    """Make an archive of files as a client sends them (wire contract, §10). Equal files make equal archives.

    Args:
        files: each with ``path``, ``type`` (48: file, 53: folder, 50: link), ``content`` in base64 and perhaps
            ``mode`` and ``mtime``.

    Raises:
        Invalid: a file's description cannot be used, or would make an archive that :func:`check_archive` refuses.
        TooMuch: it is larger than MAX_PACKED.
    """
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0, compresslevel=4) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for file in sorted(files, key=lambda f: str(f.get("path", ""))):
                member, content = _member(file)
                tar.addfile(member, io.BytesIO(content))
    data = out.getvalue()
    check_archive(io.BytesIO(data))
    return data


def check_archive(source: IO[bytes] | Path) -> None:
    """Look whether an archive can be unpacked, without doing so.

    Raises:
        Invalid: it is no gzipped tar, or a member is not allowed; the message names it.
        TooMuch: it holds more than MAX_UNPACKED bytes or MAX_MEMBERS files, or is larger than MAX_PACKED.
    """
    for _ in _members(source):
        pass


def unpack_archive(source: IO[bytes] | Path, folder: Path) -> None:
    """Write an archive's files into a folder that exists and is empty.

    Raises:
        Invalid: see :func:`check_archive`.
        TooMuch: likewise.
        OSError: the files cannot be written.
    """
    root = os.path.realpath(folder)
    links = []
    for name, member, content in _members(source):
        try:
            if _place(root, name, member, content):
                links.append(member.name)
        except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
            raise Invalid(f"the context archive is refused: {member.name!r}: {e.strerror}") from e
    for name in links:
        target = os.path.join(root, name)
        if not _inside(os.path.realpath(target), root):
            os.unlink(target)
            raise Invalid(f"the context archive is refused: the link {name!r} leads out of it")


def _place(root: str, name: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> bool:
    """Write one member; whether it is a symbolic link."""
    target = os.path.join(root, name)
    parent = os.path.dirname(target) if name != "." else root
    source = os.path.join(root, posixpath.normpath(member.linkname)) if member.islnk() else root
    for way in (parent, os.path.dirname(source) if member.islnk() else root):
        if not _inside(os.path.realpath(way), root):  # what is not there yet counts as what it says
            raise Invalid(f"the context archive is refused: {member.name!r} lies behind a link that leads out of it")
    os.makedirs(parent, exist_ok=True)
    if member.isdir():
        os.makedirs(target, exist_ok=True)
        return False
    if os.path.lexists(target):
        os.unlink(target)  # the last of one name counts, as with tar
    if content is not None:
        _write(target, content, member.mode & 0o777)
    elif member.issym():
        os.symlink(member.linkname, target)
    else:
        os.link(source, target, follow_symlinks=False)
    return member.issym()


def _members(source: IO[bytes] | Path) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """Each member that is allowed, with its path below the root, and its content if it is a file."""
    if isinstance(source, Path):
        with open(source, "rb") as f:
            yield from _members(f)
        return
    size = source.seek(0, 2)
    source.seek(0)
    if size > MAX_PACKED:
        raise TooMuch(f"the context archive has {size / 1e6:.0f} MB, and may have {MAX_PACKED / 1e6:.0f}")
    total = 0
    try:
        with tarfile.open(fileobj=source, mode="r|gz", tarinfo=_Header) as tar:
            for count, member in enumerate(tar):
                total += member.size if member.isreg() else 0
                if total > MAX_UNPACKED:
                    raise TooMuch(f"the context archive holds more than {MAX_UNPACKED >> 30} GiB unpacked")
                if count >= MAX_MEMBERS:
                    raise TooMuch(f"the context archive holds more than {MAX_MEMBERS} files")
                yield _allowed(member), member, tar.extractfile(member) if member.isreg() else None
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise Invalid(f"the context archive is no gzipped tar: {e}") from e


def _allowed(member: tarfile.TarInfo) -> str:
    name = posixpath.normpath(member.name)
    wrong = ""
    if member.name.startswith("/") or "\0" in member.name:
        wrong = "its path is absolute"
    elif name == ".." or name.startswith("../") or ".." in member.name.split("/"):
        wrong = "its path has .. in it"
    elif not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        wrong = "it is neither file, folder nor link"
    elif (member.issym() or member.islnk()) and not _stays(_goal(name, member)):
        wrong = f"it is a link to {member.linkname}, outside of it"
    if wrong:
        raise Invalid(f"the context archive is refused: {member.name!r}: {wrong}")
    return name


def _goal(name: str, link: tarfile.TarInfo) -> str:
    return posixpath.join(posixpath.dirname(name), link.linkname) if link.issym() else link.linkname


def _stays(path: str) -> bool:
    normal = posixpath.normpath(path)
    return not (normal.startswith("/") or normal == ".." or normal.startswith("../"))


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)


def _write(target: str, content: IO[bytes], mode: int) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as f:
        shutil.copyfileobj(content, f, 1 << 20)
        os.fchmod(fd, mode | 0o600)


def _member(file: Mapping[str, Any]) -> tuple[tarfile.TarInfo, bytes]:
    path = file.get("path")
    if not isinstance(path, str) or not path:
        raise Invalid(f"a file of the context has no path: {str(file)[:200]}")
    try:
        member = tarfile.TarInfo(path)
        member.type = chr(int(file.get("type") or ord("0"))).encode()
        content = b64decode(file.get("content") or "", validate=True)
        member.mode = int(file.get("mode") or (0o755 if member.isdir() else 0o644)) & 0o777
        member.mtime = int(file.get("mtime") or 0)
    except (ValueError, TypeError, OverflowError) as e:
        raise Invalid(f"the file {path!r} of the context cannot be used: {e}") from e
    if member.issym():
        member.linkname, content = content.decode(errors="surrogateescape"), b""
    member.size = len(content) if member.isreg() else 0
    return member, content
