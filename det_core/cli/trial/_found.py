"""The trial that a command line names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from det_core.client import Master, Trial


def find(master: Master, trial_id: int) -> Trial:
    """The trial of that number."""
    from det_core.client._trial import Trial
    from det_core.errors import UnknownToMaster

    try:
        return Trial(master, master.get(f"trials/{trial_id}")["trial"])
    except UnknownToMaster as e:
        raise UnknownToMaster(f"{e}; `det-core trial list EXPERIMENT` shows those of one", e.status) from None
