"""State of the service, which its modules share."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from det_core.master.service._live import Live
from det_core.master.service._subscriptions import Subscriptions

if TYPE_CHECKING:
    from det_core.master._options import Options
    from det_core.master.engines import Engine
    from det_core.master.service._access import TokenView
    from det_core.master.service._actor import Actor
    from det_core.master.service._runner import Runner
    from det_core.master.service._search_workers import SearchWorker
    from det_core.master.store import Store


@dataclass
class ServiceState:
    """State of the service.

    Attributes:
        store: Store.
        engine: Engine that runs allocations.
        settings: Settings of the master.
        live: Experiments, trials and allocations that have not ended; only the actor changes it.
        subscriptions: Changes, and the requests that wait for them.
        identities: Owners of tokens that were shown; see ``_access``.
        remarks: Remarks on ended experiments, with when they ended; looking them up takes long.
        writing: Held while a context archive becomes a file.
        log_readers: Threads that read logs, so that long reads block nothing but each other.
        log_writer: Thread that appends to logs.
        deletions: Limit of deletions in storages at a time; one that hangs delays only others.
        actor: Queue of decisions.
        runner: Queues of orders to the engine.
        workers: Searches in processes of their own, by experiment.
    """

    store: Store
    engine: Engine
    settings: Options
    live: Live = field(default_factory=Live)
    subscriptions: Subscriptions = field(default_factory=Subscriptions)
    workers: dict[int, SearchWorker] = field(default_factory=dict)
    identities: dict[str, TokenView] = field(default_factory=dict)
    remarks: dict[int, tuple[float, list[str]]] = field(default_factory=dict)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    log_readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "det-core-log-read"))
    log_writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "det-core-log-write"))
    deletions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(16))
    actor: Actor = field(init=False)
    runner: Runner = field(init=False)
