"""Samples the machine in the background and reports what it finds as metric groups."""

from det_core.core._profiler._context import ProfilerContext

__all__ = ["ProfilerContext"]
