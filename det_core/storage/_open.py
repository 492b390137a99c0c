"""From what a user writes as ``checkpoint_storage`` to a store, and to how the store is named for others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from det_core.storage._directory import DirectoryStore
from det_core.storage._drivers import Driver, azure, gcs, generic, is_secret, s3, without_secrets
from det_core.storage._object_store import ObjectStore
from det_core.storage._store import Store

DRIVERS: dict[str, Callable[..., Driver]] = {"s3": s3, "gcs": gcs, "azure": azure, "fsspec": generic}
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
NON_SECRET_KEYS = frozenset(
    ("type", "bucket", "container", "prefix", "endpoint_url", "account_url", "region", "anonymous", "url", "host_path")
    + ("storage_path", "container_path")
)
"""The keys of a ``checkpoint_storage`` mapping that lead to a store, and open nothing."""
LEFT_OUT = "options_left_out"
"""In what a record says of a store, the options of fsspec that are secrets, or that JSON cannot hold."""


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


def storage_without_secrets(checkpoint_storage: Any, store: Store) -> Any:
    """What opens ``store`` again for someone who has credentials of their own, in JSON's types.

    Args:
        checkpoint_storage: what the user gave.
        store: what was open_fd by it.
    """
    if isinstance(store, DirectoryStore):
        return store.root
    if not isinstance(checkpoint_storage, Mapping):
        return without_secrets(str(checkpoint_storage))
    if "connection_string" in checkpoint_storage:  # which alone says whose container it is
        return store.root
    found = {k: v for k, v in checkpoint_storage.items() if k in NON_SECRET_KEYS and v is not None}
    public: dict[str, Any] = {k: v if isinstance(v, bool) else without_secrets(str(v)) for k, v in found.items()}
    options, left_out = _public_options(checkpoint_storage.get("options") or {})
    if options:
        public["options"] = options
    if left_out:
        public[LEFT_OUT] = left_out
    return public


def _public_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of fsspec that JSON can hold and that are no secrets, and the names of the others."""
    public: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in options.items():
        if is_secret(str(name)):
            left_out.append(str(name))
        elif isinstance(value, Mapping):
            public[str(name)], hidden = _public_options(value)
            left_out += [f"{name}.{key}" for key in hidden]
        elif isinstance(value, str):
            public[str(name)] = without_secrets(value)
        elif isinstance(value, bool | int | float | None):
            public[str(name)] = value
        else:
            left_out.append(str(name))
    return public, left_out


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
        return DirectoryStore(os.path.expanduser(text))
    scheme, _, rest = text.partition("://")
    if "?" in rest or "#" in rest or "::" in text or not scheme.isidentifier():
        raise ValueError(
            f"checkpoint_storage={without_secrets(text)!r}: a URL has the form scheme://place/prefix and no more; "
            "give what else there is to say in a dict, as in {'type': 's3', 'bucket': …, 'endpoint_url': …}"
        )
    if scheme not in SCHEMES:
        return _from_settings({"type": "fsspec", "url": text}, scratch)
    bucket, _, prefix = rest.partition("/")
    if not bucket or "@" in bucket:
        raise ValueError(f"checkpoint_storage={scheme}://…: the form is {scheme}://bucket/prefix, without keys")
    return _from_settings(read_settings({"type": SCHEMES[scheme], "bucket": bucket, "prefix": prefix}), scratch)


def _from_file_url(text: str) -> Store:
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError(f"checkpoint_storage={text!r}: a file URL has the form file:///absolute/path and no more")
    path = unquote(url.path)
    if not path.startswith("/"):
        raise ValueError(f"checkpoint_storage={text!r}: the path of a file URL must be absolute, as in file:///data")
    return DirectoryStore(path)


def _from_settings(settings: dict[str, Any], scratch: Path) -> Store:
    kind = settings.pop("type")
    left_out = settings.pop(LEFT_OUT, [])
    if kind == "directory":
        return DirectoryStore(settings["container_path"])
    if kind == "shared_fs":
        return DirectoryStore(os.path.join(settings["host_path"], settings.get("storage_path", "")))
    return ObjectStore(DRIVERS[kind](**settings, **({"left_out": left_out} if left_out else {})), scratch)


# The ``checkpoint_storage`` mapping of an experiment's configuration.

LEGACY_KEYS = ("propagation", "container_path", "checkpoint_path", "tensorboard_path")
"""Keys of ``shared_fs`` in former times, which mean nothing here."""
RETENTION_KEYS = ("save_experiment_best", "save_trial_best", "save_trial_latest")
"""For a master to read."""
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "directory": (("container_path",), ()),
    "shared_fs": (("host_path",), ("storage_path", *LEGACY_KEYS)),
    "s3": (
        ("bucket",), ("prefix", "endpoint_url", "region", "anonymous", "access_key", "secret_key", "session_token"),
    ),
    "gcs": (("bucket",), ("prefix", "endpoint_url", "anonymous")),
    "azure": (("container",), ("prefix", "connection_string", "account_url", "credential")),
    "fsspec": (("url",), ("options", LEFT_OUT)),
}  # fmt: skip
"""Of each ``type`` the keys that it needs, and those that it may have."""
TEXT = ((str, os.PathLike), "a text")
TYPES: dict[str, tuple[Any, str]] = {
    "anonymous": (bool, "true or false"), "options": (Mapping, "a mapping"), "credential": (object, ""),
    LEFT_OUT: (list, "a list"),
}  # fmt: skip
"""What a value must be, if it is not a text. What else is wrong with one the driver says, when it is asked."""


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``type`` and the keys that mean something, checked and in their plain form.

    Raises:
        ValueError: keys are missing, unknown or wrong: all of them in one message, and no secret in it.
    """
    name = given.get("type")
    if not isinstance(name, str) or name not in KEYS:
        raise ValueError(f"checkpoint_storage.type is {name!r}: det_core opens {', '.join(KEYS)}")
    required, optional = KEYS[name]
    unused = (*RETENTION_KEYS, *LEGACY_KEYS) if name == "shared_fs" else RETENTION_KEYS
    known = (*required, *optional, *RETENTION_KEYS)
    problems = [f"{key} is missing" for key in required if given.get(key) in (None, "")]
    used: dict[str, Any] = {"type": name}
    for key, value in given.items():
        kind, words = TYPES.get(key, TEXT)
        if key == "type" or value is None or key in unused:
            continue
        if key not in known:
            problems.append(f"{key} is no key of type {name}: there are {', '.join(known)}")
        elif not isinstance(value, kind):
            problems.append(f"{key} must be {words}")
        else:
            used[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    problems = problems or _check_combinations(used)
    if problems:
        raise ValueError("checkpoint_storage: " + "; ".join(problems))
    for key in used.keys() & {"prefix", "container"}:
        used[key] = "/".join(part for part in used[key].split("/") if part not in ("", "."))
    return used


def _check_combinations(used: Mapping[str, Any]) -> list[str]:
    """What is wrong with values that depend on each other, or would lead elsewhere."""
    host = os.path.abspath(used.get("host_path", "/"))
    path = os.path.normpath(os.path.join(host, used.get("storage_path", "")))
    web = [used.get(key, "http://") for key in ("endpoint_url", "account_url")]
    rules = [
        (os.path.commonpath([host, path]) != host, f"storage_path must lie inside host_path {host!r}"),
        (not all(os.path.isabs(used.get(key, "/")) for key in ("host_path", "container_path")),
         "host_path and container_path are absolute paths"),
        ("/" in used.get("bucket", ""), "bucket must be a bare name: give the rest as prefix"),
        (any(".." in used.get(key, "").split("/") for key in ("prefix", "container")), "a prefix cannot hold '..'"),
        ("://" not in used.get("url", "://"), "url must be one of a protocol that fsspec knows"),
        (not all(url.startswith(("http://", "https://")) for url in web), "a server's URL begins with http:// or https://"),
        (("access_key" in used) != ("secret_key" in used),
         "access_key and secret_key belong together: give both, or neither to use those of AWS's own"),
        ("session_token" in used and "access_key" not in used,
         "session_token is of no use without access_key and secret_key"),
        (used.get("anonymous") and "access_key" in used,
         "anonymous is true, but there is an access_key: leave one of them out"),
        (used["type"] == "azure" and ("connection_string" in used) == ("account_url" in used),
         "give exactly one of connection_string and account_url"),
        ("credential" in used and "account_url" not in used, "credential goes with account_url only"),
    ]  # fmt: skip
    return [text for wrong, text in rules if wrong]
