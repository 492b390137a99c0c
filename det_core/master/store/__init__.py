"""The store: everything that a master must not forget, in SQLite or PostgreSQL, written before it is answered.

A row is an object of a class of ``models``, loaded and written in a work on a Session:
``await store.read(lambda session: session.get(models.Trial, 1))``. A statement stands where it is used; those of more
than one user are functions of the modules here, which take the Session first. Metrics never become objects: ``ingest``
writes them by one statement a batch, ``series`` and ``validations`` read them.
"""

# ruff: noqa: E402 - the door first: without the extra, its error says how to install it
from det_core._optional import require

require("sqlalchemy", extra="master", purpose="a master's store")

from det_core.master.store._rows import change
from det_core.master.store._store import Store
from det_core.master.store.models import Base
from det_core.master.store.series import MetricRow

METADATA = Base.metadata

__all__ = ["METADATA", "MetricRow", "Store", "change"]
