"""How long to wait before a request is sent again: pure."""

from __future__ import annotations

from collections.abc import Callable

FIRST, MOST = 0.1, 10.0
"""Seconds before the second attempt, and at most."""
LONGEST = 300.0
"""Seconds of a ``Retry-After`` that are honoured."""


class Backoff:
    """Grows with each attempt, up to :data:`MOST`, and differs between processes, so that they do not come all at once.

    Args:
        jitter: a random number from 0 to 1.
    """

    def __init__(self, jitter: Callable[[], float] | None = None) -> None:
        from random import SystemRandom  # the global generator's numbers are the script's

        self._jitter = jitter or SystemRandom().random
        self._attempts = 0

    def next(self, retry_after: str | None = None) -> float:
        """Seconds to wait now; at least what the server asks for by its header ``Retry-After``."""
        ceiling = min(MOST, FIRST * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 30)
        asked = _seconds(retry_after)
        return ceiling * (0.5 + self._jitter() / 2) if asked is None else asked + ceiling * self._jitter() / 2


def _seconds(retry_after: str | None) -> float | None:
    """A ``Retry-After`` in seconds (RFC 9110, §10.2.3: a number, or a date); None: there is none that can be used."""
    if not retry_after:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), LONGEST)
    from email.utils import parsedate_to_datetime

    from det_core import _clock

    try:
        at = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(at - _clock.now(), 0.0), LONGEST)
