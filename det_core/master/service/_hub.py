"""What the parts of the service share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from det_core.master.service._live import Live
from det_core.master.service._subscriptions import Subscriptions

if TYPE_CHECKING:
    from det_core.master._settings import MasterSettings
    from det_core.master.engines import Engine
    from det_core.master.service._actor import Actor
    from det_core.master.service._runner import Runner
    from det_core.master.service._views import TokenView
    from det_core.master.store import Store


@dataclass
class Hub:
    """The service's parts, as they see each other.

    Attributes:
        store: what is kept.
        engine: what runs allocations.
        settings: where the master is.
        live: what goes on; only the actor changes it.
        subscriptions: changes, and the requests that wait for them.
        writing: held while a context archive becomes a file.
        deletions: held while a storage deletes something; one that hangs holds up no more than others to be deleted.
        actor: where decisions are made.
        runner: what the engine is told.
        identities: whom tokens belong to, of those that were shown; see ``_identify``.
        remarks: what there is to say of experiments that have ended, with when they ended; looking it up takes long.
    """

    store: Store
    engine: Engine
    settings: MasterSettings
    live: Live = field(default_factory=Live)
    subscriptions: Subscriptions = field(default_factory=Subscriptions)
    identities: dict[str, TokenView] = field(default_factory=dict)
    remarks: dict[int, tuple[float, list[str]]] = field(default_factory=dict)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    deletions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(16))
    actor: Actor = field(init=False)
    runner: Runner = field(init=False)
