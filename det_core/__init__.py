"""SDK that turns any training script into a managed one.

``from det_core import core`` or ``import det_core as det`` and ``det.core``. Names are loaded at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core import core as core
    from det_core import errors as errors
    from det_core._info import ClusterInfo, RendezvousInfo, ResourcesInfo, TrialInfo, get_cluster_info
    from det_core.errors import InvalidHP

    __version__: str

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "InvalidHP",
    "RendezvousInfo",
    "ResourcesInfo",
    "TrialInfo",
    "__version__",
    "core",
    "get_cluster_info",
]

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""Format for ``logging.basicConfig(format=...)``: level, process and logger before the message.

A launcher prefixes such lines with ``[rank=N]``.
"""

_LAZY_EXPORTS = {
    "ClusterInfo": "_info",
    "InvalidHP": "errors",
    "RendezvousInfo": "_info",
    "ResourcesInfo": "_info",
    "TrialContext": "pytorch._trial_context",  # as trials of Determined annotate their context
    "TrialInfo": "_info",
    "get_cluster_info": "_info",
}
"""Name -> module that defines it."""


def __getattr__(name: str) -> Any:
    if name in ("core", "errors"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("det-core")
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
