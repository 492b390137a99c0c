"""Which master this is: the one of det_core, or a foreign one and of which generation (wire contract, §1.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from det_core.protocol import MasterSession

SOFTWARE = "det_core"


@dataclass(frozen=True)
class Master:
    """What a master says of itself.

    Attributes:
        version: of its software.
        software: ``det_core`` for one of ours.
        cluster_id: its lasting name.
    """

    version: str = ""
    software: str = ""
    cluster_id: str = ""

    @property
    def ours(self) -> bool:
        """Whether it takes the journal as it is."""
        return self.software == SOFTWARE

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version of a foreign one; None: it cannot be told."""
        found = re.match(r"v?(\d+)\.(\d+)", self.version)
        return None if found is None or self.ours else (int(found[1]), int(found[2]))

    @property
    def has_operations(self) -> bool | None:
        """Whether the searcher gives operations; else there is one, of the configured length. None: ask, and see."""
        if self.ours:
            return True
        return None if self.release is None else self.release < (0, 38)


def about(session: MasterSession) -> Master:
    """Ask a master what it is.

    Raises:
        MasterError: it does not answer, or is none.
    """
    found: Any = session.call("GET", "/api/v1/master")
    if not isinstance(found, dict):
        found = {}
    return Master(
        version=str(found.get("version") or ""),
        software=str(found.get("software") or ""),
        cluster_id=str(found.get("clusterId") or ""),
    )
