"""Checkpoint storages (§5.1): equal configurations have one id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from det_core.master.store._rows import insert_new, is_id
from det_core.master.store._schema import STORAGES


def ensure(session: Session, config: Mapping[str, Any]) -> int:
    """The id of a storage, which is noted if it is new."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    statement = select(STORAGES.c.id).where(STORAGES.c.digest == digest)
    found = session.execute(statement).scalar()
    if found is None:
        insert_new(session, STORAGES, {"digest": digest, "config": dict(config)})
        found = session.execute(statement).scalar_one()
    return int(found)


def get(session: Session, storage_id: int) -> dict[str, Any] | None:
    """The configuration of a storage; None if there is none of that id."""
    if not is_id(storage_id):
        return None
    found = session.execute(select(STORAGES.c.config).where(STORAGES.c.id == storage_id)).scalar()
    return None if found is None else dict(found)
