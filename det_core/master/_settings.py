"""What the master is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MasterSettings:
    """What the service has to know of the master it runs in.

    Attributes:
        home: the folder that holds all that the master keeps; its own files lie in ``home/master``.
        master_url: where trials reach the master.
        cluster_id: the master's lasting name.
        cluster_name: what people call it.
        agent_id: the name of the machine that the engine runs trials on.
        version: the version that clients are told.
        checkpoint_storage: where checkpoints go if an experiment does not say; None: ``home/checkpoints``.
        default_priority: of experiments that name none, 1 (first) to 99.
        early_exit_grace: seconds a trial may live on after it has reported an early exit.
        unmanaged_timeout: seconds without a sign of life after which an unmanaged trial is taken for dead.
        sweep_interval: seconds between looks at the unmanaged trials.
    """

    home: Path
    master_url: str = "http://127.0.0.1:8080"
    cluster_id: str = "det_core"
    cluster_name: str = "det_core"
    agent_id: str = "local"
    version: str = "0.37.0"
    checkpoint_storage: dict[str, Any] | None = field(default=None)
    default_priority: int = 42
    early_exit_grace: float = 10.0
    unmanaged_timeout: float = 300.0
    sweep_interval: float = 60.0

    @property
    def default_storage(self) -> dict[str, Any]:
        """The checkpoint storage of experiments that name none, as in a configuration."""
        if self.checkpoint_storage is not None:
            return dict(self.checkpoint_storage)
        return {"type": "directory", "container_path": str(self.home / "checkpoints")}
