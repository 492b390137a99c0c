"""The command ``det-core``."""

from det_core.cli._main import main

__all__ = ["main"]
