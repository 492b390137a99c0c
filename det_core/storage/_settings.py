"""The ``checkpoint_storage`` mapping of an experiment's configuration: which keys there are, and what they may hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Check = Callable[[Any], "str | None"]
"""Says what a value must be; None: it is that."""


def _count(value: Any) -> str | None:
    return None if type(value) is int and value >= 0 else "give it an integer of at least 0"


def _path(value: Any) -> str | None:
    return None if isinstance(value, str | os.PathLike) and os.fspath(value) else "give it a path"


def _absolute(value: Any) -> str | None:
    return _path(value) or (None if os.path.isabs(value) else "give it an absolute path")


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "give it a text"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "give it true or false"


def _name(value: Any) -> str | None:
    return _text(value) or ("give it a bare name, and the rest as prefix" if "/" in value else None)


def _prefix(value: Any) -> str | None:
    if not isinstance(value, str):
        return "give it a text"
    return "it must not hold '..'" if ".." in value.split("/") else None


def _container(value: Any) -> str | None:
    return _text(value) or _prefix(value)


def _web(value: Any) -> str | None:
    begins = isinstance(value, str) and value.startswith(("http://", "https://"))
    return None if begins else "give it a URL that begins with http:// or https://"


def _url(value: Any) -> str | None:
    return None if isinstance(value, str) and "://" in value else "give it a URL of a protocol that fsspec knows"


def _options(value: Any) -> str | None:
    fit = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return None if fit else "give it a mapping of the driver's options"


def _anything(value: Any) -> str | None:
    return None


COMMON: dict[str, Check] = dict.fromkeys(("save_experiment_best", "save_trial_best", "save_trial_latest"), _count)
"""For a master to read."""


class Kind(NamedTuple):
    """One ``type``."""

    required: dict[str, Check]
    optional: dict[str, Check]
    unused: tuple[str, ...] = ()
    """Keys of former times, which mean nothing here."""


KINDS = {
    "directory": Kind({"container_path": _absolute}, {}),
    "shared_fs": Kind(
        {"host_path": _absolute},
        {"storage_path": _path}
        | dict.fromkeys(("propagation", "container_path", "checkpoint_path", "tensorboard_path"), _path),
        ("propagation", "container_path", "checkpoint_path", "tensorboard_path"),
    ),
    "s3": Kind(
        {"bucket": _name},
        {"prefix": _prefix, "endpoint_url": _web, "access_key": _text, "secret_key": _text}
        | {"session_token": _text, "region": _text, "anonymous": _flag},
    ),
    "gcs": Kind({"bucket": _name}, {"prefix": _prefix, "endpoint_url": _web, "anonymous": _flag}),
    "azure": Kind(
        {"container": _container},
        {"prefix": _prefix, "connection_string": _text, "account_url": _web, "credential": _anything},
    ),
    "fsspec": Kind({"url": _url}, {"options": _options}),
}
SECRET = ("access_key", "secret_key", "session_token", "connection_string", "credential", "options", "url")
"""Keys whose values no message repeats."""


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``type`` and the keys that mean something, checked and in their plain form.

    Raises:
        ValueError: keys are missing, unknown or wrong: all of them in one message, and no secret in it.
    """
    name = given.get("type")
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"checkpoint_storage.type is {name!r}: det_core opens {', '.join(KINDS)}")
    kind = KINDS[name]
    known = {**kind.required, **kind.optional, **COMMON}
    problems = [f"{key} is missing" + _hint(check(None)) for key, check in kind.required.items() if key not in given]
    for key, value in given.items():
        if key == "type" or (value is None and key not in kind.required):
            continue
        if key not in known:
            problems.append(f"{key} is no key of type {name}: there are {', '.join(known)}")
        elif (wrong := known[key](value)) is not None:
            problems.append(f"{key} is {'wrong' if key in SECRET else repr(value)}: {wrong}")
    used = {k: v for k, v in given.items() if v is not None and k not in COMMON and k not in kind.unused}
    if not problems:
        problems += _CROSS[name](used)
    if problems:
        raise ValueError("checkpoint_storage: " + "; ".join(problems))
    return _plain(used)


def _hint(wrong: str | None) -> str:
    return f": {wrong}" if wrong else ""


def _plain(used: dict[str, Any]) -> dict[str, Any]:
    for key in ("prefix", "container"):
        if key in used:
            used[key] = "/".join(part for part in used[key].split("/") if part not in ("", "."))
    for key in ("container_path", "host_path", "storage_path"):
        if key in used:
            used[key] = os.fspath(used[key])
    return used


def _no_problem(used: Mapping[str, Any]) -> list[str]:
    return []


def _shared_fs(used: Mapping[str, Any]) -> list[str]:
    host = os.path.normpath(os.fspath(used["host_path"]))
    path = os.path.normpath(os.path.join(host, os.fspath(used.get("storage_path", ""))))
    if os.path.commonpath([host, path]) == host:
        return []
    return [f"storage_path is {used['storage_path']!r}: it must lie inside host_path {used['host_path']!r}"]


def _s3(used: Mapping[str, Any]) -> list[str]:
    problems = []
    if ("access_key" in used) != ("secret_key" in used):
        problems.append("access_key and secret_key belong together: give both, or neither to use those of AWS's own")
    if "session_token" in used and "access_key" not in used:
        problems.append("session_token is of no use without access_key and secret_key")
    if used.get("anonymous") and "access_key" in used:
        problems.append("anonymous is true, but there is an access_key: leave one of them out")
    return problems


def _azure(used: Mapping[str, Any]) -> list[str]:
    problems = []
    if ("connection_string" in used) == ("account_url" in used):
        problems.append("give exactly one of connection_string and account_url")
    if "credential" in used and "account_url" not in used:
        problems.append("credential goes with account_url only")
    return problems


_CROSS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    **dict.fromkeys(KINDS, _no_problem),
    "shared_fs": _shared_fs,
    "s3": _s3,
    "azure": _azure,
}
