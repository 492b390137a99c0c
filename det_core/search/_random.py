"""The Mersenne Twister as numpy's ``RandomState`` uses it, without numpy.

Python's own ``random.Random`` is the same generator (MT19937: M. Matsumoto, T. Nishimura, "Mersenne Twister",
ACM TOMACS 8, 1998); what differs is how a seed becomes its state and how bits become numbers. The tests compare
each with numpy.
"""

from __future__ import annotations

import base64
import random
import struct

_WORDS = 624
_MASK = 0xFFFFFFFF


class RandomState:
    """Draws the same numbers, in the same order, as ``numpy.random.RandomState(seed)``."""

    __slots__ = ("_random", "getrandbits", "random")

    def __init__(self, seed: int) -> None:
        """Seed it.

        Args:
            seed: 0 to 2**32 - 1.

        Raises:
            ValueError: the seed is outside that range.
        """
        if not 0 <= seed <= _MASK:
            raise ValueError(f"the seed must be from 0 to {_MASK}, and is {seed}")
        self._random = random.Random()
        self.getrandbits, self.random = self._random.getrandbits, self._random.random
        self._random.setstate((3, (*_initial(seed), _WORDS), None))

    def randint(self, low: int, high: int) -> int:
        """An integer from ``low`` (inclusive) to ``high`` (exclusive), each as likely; at most 2**64 of them."""
        span = high - low - 1
        if span <= 0:
            return low
        mask = (1 << span.bit_length()) - 1
        draw = self._next32 if span <= _MASK else self._next64
        while (value := draw() & mask) > span:
            pass
        return low + value

    def uniform(self, low: float, high: float) -> float:
        """A number from ``low`` to ``high``."""
        return low + (high - low) * self.random()

    def bytes16(self) -> bytes:
        """Sixteen bytes."""
        bits = self.getrandbits
        return struct.pack("<4I", bits(32), bits(32), bits(32), bits(32))

    def state(self) -> str:
        """Where the generator stands, for :meth:`set_state`."""
        words = self._random.getstate()[1]
        return base64.b64encode(struct.pack(f"<{_WORDS + 1}I", *words)).decode()

    def set_state(self, state: str) -> None:
        """Go on from where ``state`` was taken."""
        self._random.setstate((3, struct.unpack(f"<{_WORDS + 1}I", base64.b64decode(state)), None))

    def _next32(self) -> int:
        return self.getrandbits(32)

    def _next64(self) -> int:
        return self.getrandbits(32) << 32 | self.getrandbits(32)


def _initial(seed: int) -> list[int]:
    """The generator's words for a seed (Knuth's recurrence, as in the authors' 2002 version)."""
    words = [seed]
    for i in range(1, _WORDS):
        last = words[-1]
        words.append((1812433253 * (last ^ (last >> 30)) + i) & _MASK)
    return words


def uuid4_of(data: bytes) -> str:
    """Sixteen random bytes as the text of a UUID of version 4 (RFC 9562). The module uuid takes four times as long."""
    text = data.hex()
    variant = "89ab"[data[8] >> 4 & 3]
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"
