"""Rules of a ``checkpoint_storage`` mapping: the keys of each type, and which values fit together.

Scripts, experiment files and masters share them. The types of single values are checked where they are read.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

RETENTION_KEYS = ("save_experiment_best", "save_trial_best", "save_trial_latest")
"""Keys of every type, for a master: how many checkpoints stay when an experiment has ended."""
LEGACY_KEYS = ("propagation", "container_path", "checkpoint_path", "tensorboard_path")
"""Keys of ``shared_fs`` in older configurations, without effect here."""
OMITTED_OPTIONS = "options_left_out"
"""Key that a run's record adds: the options of fsspec it does not keep, as they are secrets or not JSON."""
KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "directory": (("container_path",), ()),
    "shared_fs": (("host_path",), ("storage_path", *LEGACY_KEYS)),
    "s3": (
        ("bucket",), ("prefix", "endpoint_url", "region", "anonymous", "access_key", "secret_key", "session_token"),
    ),
    "gcs": (("bucket",), ("prefix", "endpoint_url", "anonymous")),
    "azure": (("container",), ("prefix", "connection_string", "account_url", "credential")),
    "fsspec": (("url",), ("options", OMITTED_OPTIONS)),
}  # fmt: skip
"""Required and optional keys of each ``type``."""
BUCKET_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Types whose URLs have the form ``scheme://bucket/prefix``, by scheme."""


def location(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say where a storage is: those that are set, without the retention keys."""
    return {key: value for key, value in settings.items() if value is not None and key not in RETENTION_KEYS}


def find_conflicts(settings: Mapping[str, Any]) -> list[str]:
    """Return a message for each rule between values that the settings break; a key that is not set may be missing."""
    given = location(settings)
    host = posixpath.normpath(posixpath.join("/", given.get("host_path", "")))
    directory = posixpath.normpath(posixpath.join(host, given.get("storage_path", "")))
    accounts = given.keys() & {"connection_string", "account_url"}
    rules = [
        (posixpath.commonpath([host, directory]) != host, f"storage_path must lie inside host_path {host!r}"),
        (("access_key" in given) != ("secret_key" in given),
         "access_key and secret_key belong together: give both, or neither to use those of the environment"),
        ("session_token" in given and "access_key" not in given,
         "session_token needs the access_key and secret_key that it belongs to"),
        (given.get("anonymous") and "access_key" in given, "anonymous=true excludes access_key: remove one of them"),
        (given.get("type") == "azure" and len(accounts) != 1, "give exactly one of connection_string and account_url"),
        ("credential" in given and "account_url" not in given, "credential is only used with account_url: remove it"),
    ]  # fmt: skip
    return [message for is_broken, message in rules if is_broken]
