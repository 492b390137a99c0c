"""Objects that a forked child of this process must give up, such as a worker of a DataLoader."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ForkGuard(weakref.WeakSet[T]):
    """Weak set of objects that a forked child gives up before any of its own code runs.

    Guards act in the order in which they were made, which is that of imports.

    Args:
        give_up: called in the child with each object. Takes no lock, which another thread of the parent may have held.
    """

    def __init__(self, give_up: Callable[[T], None]) -> None:
        super().__init__()
        self._give_up = give_up
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # They stay in the set: at the fork of a child's child, another thread may hold a lock of their copies again.
        for item in list(self):
            self._give_up(item)
