"""Why a job cannot go on: one reason for all its ranks, as it travels between them and as each rank raises it."""

from __future__ import annotations

import json
from typing import NamedTuple

from det_core.errors import CollectiveMismatch, ContextClosed, DistributedError, PeerLost

_ERRORS: dict[str, type[DistributedError]] = {
    "lost": PeerLost,
    "mismatch": CollectiveMismatch,
    "closed": ContextClosed,
    "broken": DistributedError,
}


class Trouble(NamedTuple):
    """What happened: ``kind`` is a key of the errors above, or ``ended`` when a rank has ended the job on purpose."""

    kind: str
    text: str

    def error(self) -> BaseException:
        """A new exception to raise for it."""
        if self.kind == "ended":
            return SystemExit(0)
        return _ERRORS[self.kind](self.text)

    def encode(self) -> bytes:
        """For the wire."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Trouble:
        """From the wire."""
        kind, text = json.loads(bytes(data))
        return cls(kind if kind == "ended" or kind in _ERRORS else "broken", text)
