"""Saving a state of torch aside: copied into shared memory, and written from there by a process beside this one."""

from det_core.core._checkpoint._aside._order import Order
from det_core.core._checkpoint._aside._prepare import Announcement
from det_core.core._checkpoint._aside._states import States

__all__ = ["Announcement", "Order", "States"]
