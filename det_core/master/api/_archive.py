"""Context directories as they travel: file by file (§10), or packed."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence

from det_core.master._errors import Invalid
from det_core.master.api._types import Body, Int64
from det_core.master.engines import check_archive, pack_files


class FileEntry(Body):
    """One file (``type`` 48), folder (53) or link (50); ``content`` in base64, ``mode`` as of chmod."""

    path: str
    type: Int64 = 48
    content: str = ""
    mtime: Int64 = 0
    mode: Int64 = 0o644


def packed(files: Sequence[FileEntry], b64_tgz: str | None) -> bytes | None:
    """The context directory as an archive that can be unpacked; None without one. Takes a while if it is large.

    Raises:
        Invalid: it came in both forms; or something in it is not allowed, and the message names that.
        TooMuch: it is too large, packed or unpacked.
    """
    if b64_tgz and files:
        raise Invalid("the context directory comes either as modelDefinition or as b64Tgz, not as both")
    if not b64_tgz:
        return pack_files([file.model_dump() for file in files]) if files else None
    try:
        archive = base64.b64decode(b64_tgz, validate=True)
    except (binascii.Error, ValueError) as e:
        raise Invalid(f"body b64Tgz: no base64: {e}") from None
    check_archive(io.BytesIO(archive))
    return archive
