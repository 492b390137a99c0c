"""Decisions of the master: requests and events in, recorded decisions out.

Each topic is a module of functions that take the state of the service. They may be called at any time on the loop that
it was started on. What they return is in the store already; what they refuse raises a MasterError; a repeat of a
request that was carried out changes nothing and gets the same answer.
"""

from det_core.master.service._state import ServiceState

__all__ = ["ServiceState"]
