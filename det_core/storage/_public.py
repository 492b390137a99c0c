"""How a store is named in a record that others read: all that leads to it, and nothing that opens it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from det_core.storage._directory import DirectoryStore
from det_core.storage._store import Store

PUBLIC_KEYS = frozenset(
    ["type", "bucket", "container", "prefix", "endpoint_url", "account_url", "region", "anonymous", "url"]
    + ["host_path", "storage_path", "container_path"]
)
"""The keys of a ``checkpoint_storage`` mapping that lead to a store."""


def public_storage(checkpoint_storage: Any, store: Store) -> Any:
    """What opens ``store`` again for someone who has credentials of their own, in JSON's types.

    Args:
        checkpoint_storage: what the user gave.
        store: what was opened by it.
    """
    if isinstance(store, DirectoryStore):
        return store.root
    if isinstance(checkpoint_storage, Mapping):
        if "connection_string" in checkpoint_storage:  # which alone says whose container it is
            return store.root
        found = {k: v for k, v in checkpoint_storage.items() if k in PUBLIC_KEYS and v is not None}
        return {k: v if isinstance(v, bool) else _text(str(v)) for k, v in found.items()}
    return _text(str(checkpoint_storage))


def _text(text: str) -> str:
    """A text, and if it is a URL, without name and password of a user, without query and fragment."""
    if "://" not in text:
        return text
    url = urlsplit(text)
    user, at, host = url.netloc.rpartition("@")
    return url._replace(netloc=host if ":" in user else user + at + host, query="", fragment="").geturl()
