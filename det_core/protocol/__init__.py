"""The wire protocol: HTTP to a master, for scripts, the Python client and commands."""

from det_core.protocol.transport import IDLE_TIMEOUT, Credential, MasterSession, credentials

__all__ = ["IDLE_TIMEOUT", "Credential", "MasterSession", "credentials"]
