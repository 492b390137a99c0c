"""Open the store that ``checkpoint_storage`` names, and name it again in a record without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from det_core._storage_settings import (
    BUCKET_SCHEMES,
    KEYS,
    LEGACY_KEYS,
    OMITTED_OPTIONS,
    RETENTION_KEYS,
    find_conflicts,
)
from det_core.storage._directory import DirectoryStore
from det_core.storage._drivers import Driver, azure, gcs, generic, is_secret, s3, without_secrets
from det_core.storage._object_store import ObjectStore
from det_core.storage._store import Store

DRIVERS: dict[str, Callable[..., Driver]] = {"s3": s3, "gcs": gcs, "azure": azure, "fsspec": generic}
"""Constructor of the driver, by type."""
NON_SECRET_KEYS = frozenset(
    ("type", "bucket", "container", "prefix", "endpoint_url", "account_url", "region", "anonymous", "url", "host_path")
    + ("storage_path", "container_path")
)
"""Keys of a mapping that say where a store is and grant no access."""
_TEXT = ((str, os.PathLike), "a text")
_VALUE_TYPES: dict[str, tuple[Any, str]] = {
    "anonymous": (bool, "true or false"),
    "options": (Mapping, "a mapping"),
    "credential": (object, ""),
    OMITTED_OPTIONS: (list, "a list"),
}
"""Expected type of a value that is not a text. A driver finds any other fault of it at the first request."""


def open_store(
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None, default: Path, *, scratch: Path | None = None
) -> Store:
    """Return the store that ``checkpoint_storage`` names. Nothing is created, read or connected yet.

    Args:
        checkpoint_storage: a directory's path; a URL: ``file:///directory``, ``s3://bucket/prefix``,
            ``gs://bucket/prefix``, ``az://container/prefix``, or one of any other protocol that fsspec has a driver
            for; or a mapping as in an experiment's configuration, whose ``type`` is directory, shared_fs, s3, gcs,
            azure or fsspec. None stands for ``default``.
        default: directory of the default store.
        scratch: local directory for files that are uploaded afterwards. Defaults to one for temporary files.

    Raises:
        ValueError: If it does not name a store that det_core can open; the message lists every wrong key.
        MissingExtra: If the store's driver is not installed; the message has the command that installs it.
    """
    if checkpoint_storage is None:
        return DirectoryStore(default)
    scratch = scratch or _temporary_scratch()
    if isinstance(checkpoint_storage, Mapping):
        return _from_settings(read_settings(checkpoint_storage), scratch)
    if isinstance(checkpoint_storage, str | os.PathLike):
        return _from_text(os.fspath(checkpoint_storage), scratch)
    raise ValueError(f"checkpoint_storage must be a path, a URL or a dict, not {type(checkpoint_storage).__name__}")


def storage_without_secrets(checkpoint_storage: Any, store: Store) -> Any:
    """Return a description from which ``store`` can be opened with other credentials, in JSON's types.

    Args:
        checkpoint_storage: the value that the user passed.
        store: the store that was opened from it.
    """
    if isinstance(store, DirectoryStore):
        return store.root
    if not isinstance(checkpoint_storage, Mapping):
        return without_secrets(str(checkpoint_storage))
    if "connection_string" in checkpoint_storage:  # a secret, and the only key that names the account
        return store.root
    public: dict[str, Any] = {}
    for key, value in checkpoint_storage.items():
        if key in NON_SECRET_KEYS and value is not None:
            public[key] = value if isinstance(value, bool) else without_secrets(str(value))
    options, omitted = _public_options(checkpoint_storage.get("options") or {})
    if options:
        public["options"] = options
    if omitted:
        public[OMITTED_OPTIONS] = omitted
    return public


def _public_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of fsspec that are not secrets and fit into JSON, and the names of the others."""
    public: dict[str, Any] = {}
    omitted: list[str] = []
    for name, value in options.items():
        if is_secret(str(name)):
            omitted.append(str(name))
        elif isinstance(value, Mapping):
            public[str(name)], hidden = _public_options(value)
            omitted += [f"{name}.{key}" for key in hidden]
        elif isinstance(value, str):
            public[str(name)] = without_secrets(value)
        elif isinstance(value, bool | int | float | None):
            public[str(name)] = value
        else:
            omitted.append(str(name))
    return public, omitted


def _temporary_scratch() -> Path:
    import tempfile

    return Path(tempfile.gettempdir(), f"det_core-{os.getuid()}", "scratch")


def _from_text(text: str, scratch: Path) -> Store:
    if not text:
        raise ValueError("checkpoint_storage is empty: pass a directory, or None for the run's own directory")
    if text.startswith("file:"):
        return _from_file_url(text)
    if "://" not in text:
        # A directory may be called "s3:", but "s3:/bucket" is almost always a URL with a slash missing.
        if (scheme := re.match(r"(\w[\w+.-]*):/", text)) is not None:
            raise ValueError(
                f"checkpoint_storage={text!r}: a URL has two slashes, {scheme[1]}://…; for a directory of that name "
                f"pass ./{text}"
            )
        return DirectoryStore(os.path.expanduser(text))
    return _from_url(text, scratch)


def _from_url(text: str, scratch: Path) -> Store:
    scheme, _, rest = text.partition("://")
    # fsspec would take "a::b" as a chain of file systems, and options in a query would end up in messages.
    if "?" in rest or "#" in rest or "::" in text or not scheme.isidentifier():
        raise ValueError(
            f"checkpoint_storage={without_secrets(text)!r}: expected a URL of the form scheme://place/prefix and no "
            "more; pass options in a dict, as in {'type': 's3', 'bucket': …, 'endpoint_url': …}"
        )
    if scheme not in BUCKET_SCHEMES:
        return _from_settings({"type": "fsspec", "url": text}, scratch)
    bucket, _, prefix = rest.partition("/")
    if not bucket or "@" in bucket:
        raise ValueError(f"checkpoint_storage={scheme}://…: expected {scheme}://bucket/prefix, without keys")
    settings = {"type": BUCKET_SCHEMES[scheme], "bucket": bucket, "prefix": prefix}
    return _from_settings(read_settings(settings), scratch)


def _from_file_url(text: str) -> Store:
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError(f"checkpoint_storage={text!r}: expected file:///absolute/path and no more")
    path = unquote(url.path)
    if not path.startswith("/"):
        raise ValueError(f"checkpoint_storage={text!r}: the path of a file URL must be absolute, as in file:///data")
    return DirectoryStore(path)


def _from_settings(settings: dict[str, Any], scratch: Path) -> Store:
    kind = settings.pop("type")
    omitted = settings.pop(OMITTED_OPTIONS, [])
    if kind == "directory":
        return DirectoryStore(settings["container_path"])
    if kind == "shared_fs":
        return DirectoryStore(os.path.join(settings["host_path"], settings.get("storage_path", "")))
    if omitted:  # a key of fsspec alone
        settings["omitted"] = omitted
    return ObjectStore(DRIVERS[kind](**settings), scratch)


def read_settings(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``type`` and the keys that have an effect, checked, with paths as texts and prefixes in normal form.

    Raises:
        ValueError: If keys are missing, unknown or wrong; one message lists all of them, without values.
    """
    kind = mapping.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(f"checkpoint_storage.type is {kind!r}: det_core opens {', '.join(KEYS)}")
    required, optional = KEYS[kind]
    ignored: tuple[str, ...] = RETENTION_KEYS
    if kind == "shared_fs":
        ignored = (*ignored, *LEGACY_KEYS)
    allowed = (*required, *optional, *RETENTION_KEYS)
    problems = [f"{key} is missing" for key in required if mapping.get(key) in (None, "")]
    settings: dict[str, Any] = {"type": kind}
    for key, value in mapping.items():
        expected, description = _VALUE_TYPES.get(key, _TEXT)
        if key == "type" or value is None or key in ignored:
            continue
        if key not in allowed:
            problems.append(f"{key}: unknown key for type {kind}; allowed: {', '.join(allowed)}")
        elif not isinstance(value, expected):
            problems.append(f"{key} must be {description}")
        else:
            settings[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    problems = problems or _check_values(settings) + find_conflicts(settings)
    if problems:
        raise ValueError("checkpoint_storage: " + "; ".join(problems))
    for key in settings.keys() & {"prefix", "container"}:
        settings[key] = "/".join(part for part in settings[key].split("/") if part not in ("", "."))
    return settings


def _check_values(settings: Mapping[str, Any]) -> list[str]:
    """Return a message for each value that has the right type and cannot be used."""
    directories = [settings.get(key, "/") for key in ("host_path", "container_path")]
    prefixes = [settings.get(key, "") for key in ("prefix", "container")]
    servers = [settings.get(key, "http://") for key in ("endpoint_url", "account_url")]
    rules = [
        (not all(map(os.path.isabs, directories)), "host_path and container_path must be absolute paths"),
        ("/" in settings.get("bucket", ""), "bucket must be a bare name: pass the rest as prefix"),
        (any(".." in prefix.split("/") for prefix in prefixes), "a prefix cannot hold '..'"),
        ("://" not in settings.get("url", "://"), "url must be one of a protocol that fsspec knows"),
        (
            not all(url.startswith(("http://", "https://")) for url in servers),
            "the URL of a server begins with http:// or https://",
        ),
    ]
    return [message for is_broken, message in rules if is_broken]
