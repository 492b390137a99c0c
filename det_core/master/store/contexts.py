"""Context archives, each kept once however many experiments it belongs to."""

from __future__ import annotations

import hashlib

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store._rows import insert_new
from det_core.master.store._schema import CONTEXTS, EXPERIMENTS


def put(session: Session, content: bytes) -> str:
    """Keep an archive; returns its digest (sha256, hex)."""
    digest = hashlib.sha256(content).hexdigest()
    if session.execute(select(CONTEXTS.c.size).where(CONTEXTS.c.digest == digest)).scalar() is None:
        values = {"digest": digest, "content": content, "size": len(content), "create_time": _clock.now()}
        insert_new(session, CONTEXTS, values)
    return digest


def get(session: Session, digest: str) -> bytes | None:
    """The archive of that digest; None if there is none."""
    found = session.execute(select(CONTEXTS.c.content).where(CONTEXTS.c.digest == digest)).scalar()
    return None if found is None else bytes(found)


def drop_unused(session: Session) -> int:
    """Delete the archives that belong to no experiment, deleted ones left aside; returns how many."""
    used = select(EXPERIMENTS.c.context).where(EXPERIMENTS.c.context.is_not(None), EXPERIMENTS.c.state != "DELETED")
    return (
        session.connection().execute(delete(CONTEXTS).where(CONTEXTS.c.digest.not_in(used.scalar_subquery()))).rowcount
    )
