"""One rank that no launcher of ours stands above: it lives as long as the process that started it."""

from __future__ import annotations

import os
import signal

from ._linux import signal_at_parents_death
from ._rank import RankProcess


class Alone(RankProcess):
    """Runs a script with a prefix before every line, passes signals on, and kills its group when its parent dies."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, _parents_death(), None)

    def run(self, command: list[str], out_to: int = 1, err_to: int = 2) -> int:
        """Run ``command`` and return its exit status, as a shell would give it."""
        pump = self._carry(command, out_to, err_to)
        if pump.lost:
            os.write(2, b"[rank=%d] %d bytes of its output could not be written\n" % (self._rank, pump.lost))
        status = self._status or 0
        return status if status >= 0 else 128 - status

    def _news(self) -> None:
        self._kill()
        os._exit(1)

    def _terminated(self) -> None:
        self._send(signal.SIGTERM)


def _parents_death() -> int:
    """A file descriptor that is readable once the parent has died."""
    parent = os.getppid()
    try:
        return os.pidfd_open(parent)
    except OSError:  # a kernel before 5.3; or it has died just now, which shows as that of an orphan
        signal_at_parents_death(signal.SIGKILL)
        return os.pipe()[0]
