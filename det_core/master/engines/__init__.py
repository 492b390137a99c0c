"""Engines run the allocations of trials: as processes on this machine."""

from det_core.master.engines._protocol import Ended, Engine, ExitReport, LaunchSpec, Listener, LogLine

__all__ = ["Ended", "Engine", "ExitReport", "LaunchSpec", "Listener", "LogLine"]
