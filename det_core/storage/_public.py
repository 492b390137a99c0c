"""How a store is named in a record that others read: all that leads to it, and nothing that opens it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from det_core.storage._directory import DirectoryStore
from det_core.storage._store import Store

PUBLIC_KEYS = frozenset(
    ["type", "bucket", "prefix", "container", "endpoint_url", "account_url", "region"]
    + ["host_path", "storage_path", "container_path"]
)
"""The keys of a ``checkpoint_storage`` mapping, and of a URL's query, that lead to a store."""


def public_storage(checkpoint_storage: Any, store: Store) -> Any:
    """What opens ``store`` again for someone who has credentials of their own, in JSON's types.

    Args:
        checkpoint_storage: what the user gave.
        store: what was opened by it.
    """
    if isinstance(store, DirectoryStore):
        return store.root
    if isinstance(checkpoint_storage, Mapping):
        return {k: _text(str(v)) for k, v in checkpoint_storage.items() if k in PUBLIC_KEYS and v is not None}
    return _text(str(checkpoint_storage))


def _text(text: str) -> str:
    """A text without the password and the keys that a URL may hold."""
    if "://" not in text:
        return text
    url = urlsplit(text)
    user, at, host = url.netloc.rpartition("@")
    netloc = host if ":" in user else f"{user}{at}{host}"
    query = urlencode([(k, _text(v)) for k, v in parse_qsl(url.query) if k in PUBLIC_KEYS])
    return url._replace(netloc=netloc, query=query, fragment="").geturl()
