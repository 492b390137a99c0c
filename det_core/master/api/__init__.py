"""The master's HTTP API: requests into calls of the service, and its answers into the wire contract's shapes."""

from det_core.master.api._app import create_app
from det_core.master.api._limits import Limits, raise_open_file_limit, server_config

__all__ = ["Limits", "create_app", "raise_open_file_limit", "server_config"]
