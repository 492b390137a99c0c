"""The wheel, and an environment that has it."""

from __future__ import annotations

from support.environments import dist, installed, wheel

__all__ = ["dist", "installed", "wheel"]
