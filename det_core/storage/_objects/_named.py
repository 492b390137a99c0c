"""Object stores by what a user names them with: the driver of each service, imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core._optional import require
from det_core.errors import MissingExtra
from det_core.storage._objects._bucket import Bucket
from det_core.storage._objects._door import Door
from det_core.storage._objects._store import ObjectStore

SECRET = ("key", "secret", "token", "password", "passphrase", "credential", "connection_string", "sas", "pkey")
"""An option whose name holds one of these is shown to nobody."""


def open_s3(scratch: Path, bucket: str, prefix: str = "", **options: Any) -> ObjectStore:
    """A bucket of S3, or of what speaks its protocol."""
    from det_core.storage._objects._s3 import S3Bucket

    return _store(S3Bucket(bucket, prefix, **options), scratch)


def open_gcs(scratch: Path, bucket: str, prefix: str = "", **options: Any) -> ObjectStore:
    """A bucket of Google Cloud Storage."""
    from det_core.storage._objects._gcs import GcsBucket

    return _store(GcsBucket(bucket, prefix, **options), scratch)


def open_azure(
    scratch: Path,
    container: str,
    prefix: str = "",
    *,
    connection_string: str | None = None,
    account_url: str | None = None,
    credential: Any = None,
) -> ObjectStore:
    """A container of Azure's blob storage; the environment (``AZURE_STORAGE_…``) says what is left out."""
    from urllib.parse import urlsplit

    options: dict[str, Any] = {}
    if connection_string is not None:
        options["connection_string"] = connection_string
    elif account_url is not None:
        host = urlsplit(account_url).netloc
        options |= {"account_name": host.split(".")[0], "account_host": host, "anon": False}
        if isinstance(credential, str):
            token = "sig=" in credential
            options["sas_token" if token else "account_key"] = credential
        elif credential is not None:
            options["credential"] = credential
    return open_fsspec(scratch, f"az://{container}/{prefix}".rstrip("/"), options)


def open_fsspec(scratch: Path, url: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Any file system that fsspec has a driver for.

    Raises:
        ValueError: no driver has this protocol.
        MissingExtra: the driver's own package is not installed.
    """
    from det_core.storage._objects._generic import FsspecBucket

    protocol = url.split("://", 1)[0]
    kind = _driver(protocol)
    found = {**kind._get_kwargs_from_urls(url), **(options or {})}
    secrets = {str(v) for k, v in found.items() if v and any(word in k.lower() for word in SECRET)}
    path = kind._strip_protocol(url)
    return _store(FsspecBucket(shown(url), kind, path, found, secrets), scratch)


def shown(url: str) -> str:
    """A URL without the name and the password of its user."""
    protocol, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    name, at, place = host.rpartition("@")
    return f"{protocol}://{place if ':' in name else name + at + place}{slash}{path}".rstrip("/")


def _driver(protocol: str) -> Any:
    if protocol in ("az", "abfs", "abfss"):
        return require("adlfs", extra="azure", purpose="a checkpoint store on Azure").AzureBlobFileSystem
    import fsspec

    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ValueError(
            f"checkpoint_storage: nothing opens {protocol}://; fsspec knows {', '.join(_protocols())}"
        ) from None
    except ImportError as e:
        cause = e.__cause__ or e.__context__ or e
        package = (getattr(cause, "name", None) or protocol).split(".")[0]
        raise MissingExtra(
            f"a checkpoint store on {protocol}:// needs {package} ({e}). Install it: pip install {package}"
        ) from e


def _protocols() -> list[str]:
    from fsspec import available_protocols

    return sorted(name for name in available_protocols() if name not in ("local",))


def _store(bucket: Bucket, scratch: Path) -> ObjectStore:
    return ObjectStore(Door(bucket), scratch)
