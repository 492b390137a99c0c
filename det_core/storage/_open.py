"""From what a user writes as ``checkpoint_storage`` to a store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.storage._directory import DirectoryStore
from det_core.storage._settings import read_settings
from det_core.storage._store import Store

S3 = ("s3", "s3a")
GCS = ("gs", "gcs")


def open_store(
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None, default: Path, *, scratch: Path | None = None
) -> Store:
    """Return the store that ``checkpoint_storage`` names. Nothing is made, read or connected yet.

    Args:
        checkpoint_storage: a folder's path; a URL, as ``file:///folder``, ``s3://bucket/prefix``,
            ``gs://bucket/prefix``, ``az://container/prefix``, or of any other protocol that fsspec has a driver for;
            or a mapping as in an experiment's configuration, whose ``type`` is directory, shared_fs, s3, gcs, azure or
            fsspec. None: ``default``.
        default: the folder to use if nothing else is said.
        scratch: where scripts write, on this machine, what is then uploaded; None: a folder for temporary files.

    Raises:
        ValueError: it names no store that det_core can open; every wrong key is named at once.
        MissingExtra: the store's driver is not installed; the message is the command that installs it.
    """
    if checkpoint_storage is None:
        return DirectoryStore(default)
    scratch = scratch or _temporary()
    if isinstance(checkpoint_storage, Mapping):
        return _from_settings(read_settings(checkpoint_storage), scratch)
    if isinstance(checkpoint_storage, str | os.PathLike):
        return _from_text(os.fspath(checkpoint_storage), scratch)
    raise ValueError(f"checkpoint_storage must be a path, a URL or a dict, not {type(checkpoint_storage).__name__}")


def _temporary() -> Path:
    import tempfile

    return Path(tempfile.gettempdir(), f"det_core-{os.getuid()}", "scratch")


def _from_text(text: str, scratch: Path) -> Store:
    if not text:
        raise ValueError("checkpoint_storage is empty: pass a folder, or None for the run's own folder")
    if text.startswith("file:"):
        return _from_file_url(text)
    if "://" not in text:
        if (half := re.match(r"(\w[\w+.-]*):/", text)) is not None:
            raise ValueError(
                f"checkpoint_storage={text!r}: a URL has two slashes, {half[1]}://…; a folder of that name is ./{text}"
            )
        return DirectoryStore(Path(text).expanduser())
    scheme, _, rest = text.partition("://")
    if "?" in rest or "#" in rest or "::" in text or not scheme.isidentifier():
        raise ValueError(
            f"checkpoint_storage={_hidden(text)!r}: a URL has the form scheme://place/prefix and no more; "
            "give what else there is to say in a dict, as in {'type': 's3', 'bucket': …, 'endpoint_url': …}"
        )
    if scheme not in (*S3, *GCS):
        from det_core.storage._objects._named import open_fsspec

        return open_fsspec(scratch, text)
    bucket, _, prefix = rest.partition("/")
    if not bucket or "@" in bucket:
        raise ValueError(f"checkpoint_storage={_hidden(text)!r}: the form is {scheme}://bucket/prefix, without keys")
    kind = "s3" if scheme in S3 else "gcs"
    return _from_settings(read_settings({"type": kind, "bucket": bucket, "prefix": prefix}), scratch)


def _hidden(text: str) -> str:
    """A URL without what may be secret in it."""
    scheme, _, rest = text.partition("://")
    place, slash, path = rest.partition("/")
    path = path.partition("?")[0] + ("?…" if "?" in path else "")
    return f"{scheme}://{place.rpartition('@')[2].partition('?')[0]}{slash}{path}"


def _from_file_url(text: str) -> Store:
    from urllib.parse import unquote, urlsplit

    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError(f"checkpoint_storage={text!r}: a file URL has the form file:///absolute/path and no more")
    path = unquote(url.path)
    if not path.startswith("/"):
        raise ValueError(f"checkpoint_storage={text!r}: the path of a file URL must be absolute, as in file:///data")
    return DirectoryStore(path)


def _from_settings(settings: dict[str, Any], scratch: Path) -> Store:
    kind = settings.pop("type")
    if kind == "directory":
        return DirectoryStore(settings["container_path"])
    if kind == "shared_fs":
        return DirectoryStore(os.path.join(settings["host_path"], settings.get("storage_path", "")))

    from det_core.storage._objects import _named

    if kind == "s3":
        return _named.open_s3(scratch, **settings)
    if kind == "gcs":
        return _named.open_gcs(scratch, **settings)
    if kind == "azure":
        return _named.open_azure(scratch, **settings)
    return _named.open_fsspec(scratch, settings["url"], settings.get("options"))
