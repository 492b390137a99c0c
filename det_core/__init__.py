"""det_core: an SDK that turns any training script into a managed one.

``from det_core import core`` or ``import det_core as det`` and ``det.core``, which is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core._info import ClusterInfo, RendezvousInfo, ResourcesInfo, TrialInfo, get_cluster_info
from det_core.errors import InvalidHP

if TYPE_CHECKING:
    from det_core import core as core

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
"""A format for ``logging.basicConfig(format=...)``: the level, process and logger of a line stand before its
message, also behind the ``[rank=N]`` that a launcher puts in front."""


def __getattr__(name: str) -> object:
    if name == "core":
        import importlib

        return importlib.import_module("det_core.core")
    if name == "TrialContext":  # as trials of Determined annotate their context
        import importlib

        return importlib.import_module("det_core.pytorch._trial_context").TrialContext
    if name == "__version__":
        from importlib.metadata import version

        return version("det-core")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
