"""Context directories as they travel: file by file (§10), or packed."""

from __future__ import annotations

import base64
import binascii
import io
import tarfile
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from det_core.master._errors import Invalid
from det_core.master.api._types import Body, Int64

_FILE, _FOLDER = ord(tarfile.REGTYPE), ord(tarfile.DIRTYPE)


class FileEntry(Body):
    """One file (``type`` 48) or folder (53): ``content`` in base64, ``mode`` as of chmod, ``mtime`` in seconds."""

    path: str
    type: int = _FILE
    content: str = ""
    mtime: Int64 = 0
    mode: Annotated[int, Field(ge=0, le=0o177777)] = 0o644


def pack(files: Sequence[FileEntry]) -> bytes | None:
    """The files as a tar archive, gzipped; None without any.

    Raises:
        Invalid: an entry that is neither file nor folder, or whose content is no base64. Where it would lead is
            looked at by whoever unpacks it.
    """
    if not files:
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for file in files:
            if file.type not in (_FILE, _FOLDER):
                raise Invalid(
                    f"modelDefinition: {file.path!r} is neither a file nor a folder (its type is {file.type})"
                )
            content = _decoded(file.content, f"modelDefinition: {file.path!r}")
            member = tarfile.TarInfo(file.path)
            member.type = bytes([file.type])
            member.mode, member.mtime = file.mode & 0o7777, file.mtime
            member.size = len(content) if file.type == _FILE else 0
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def unpack64(text: str) -> bytes | None:
    """The archive that came in base64; None if it is empty.

    Raises:
        Invalid: it is no base64.
    """
    return _decoded(text, "b64Tgz") or None


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise Invalid(f"{what} is no base64: {e}") from None
