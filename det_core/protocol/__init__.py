"""The wire protocol: HTTP to a master, for scripts, the Python client and commands."""

from det_core.protocol.transport import IDLE_TIMEOUT, MasterSession

__all__ = ["IDLE_TIMEOUT", "MasterSession"]
