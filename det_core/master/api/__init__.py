"""The master's HTTP API: requests into calls of the service, and its answers into the wire contract's shapes."""

from det_core.master.api._app import create_app

__all__ = ["create_app"]
