"""Time, in one place, so that tests can set it."""

from __future__ import annotations

import time
from datetime import datetime, timezone

now = time.time
"""Seconds since the epoch, as a float: wall time, for records that people read."""

monotonic = time.monotonic
"""Seconds that never jump, for deadlines."""


def iso(seconds: float) -> str:
    """``seconds`` since the epoch as RFC 3339 in UTC with microseconds."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")
