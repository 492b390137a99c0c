"""Runs under a master: the backend that asks it over HTTP, and what sends the journal there."""

from det_core.backend._bodies import storage_settings
from det_core.backend._operations import Master, about
from det_core.backend._rest import RestBackend, Task
from det_core.backend._shipper import Carrier, JournalCarrier, Refusal, ReportCarrier, Shipper
from det_core.backend._sync import Synced, sync_run, write_task

__all__ = [
    "Carrier",
    "JournalCarrier",
    "Master",
    "Refusal",
    "ReportCarrier",
    "RestBackend",
    "Shipper",
    "Synced",
    "Task",
    "about",
    "storage_settings",
    "sync_run",
    "write_task",
]
