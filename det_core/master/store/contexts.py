"""Context archives, each kept once however many experiments it belongs to."""

from __future__ import annotations

import hashlib

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from det_core.master.store.models import Context, Experiment


def put(session: Session, content: bytes) -> str:
    """Store an archive; return its digest."""
    digest = hashlib.sha256(content).hexdigest()
    if session.scalar(select(Context.size).where(Context.digest == digest)) is None:
        session.add(Context(digest=digest, content=content, size=len(content)))
    return digest


def get(session: Session, digest: str) -> bytes | None:
    """Return the archive of a digest, or None."""
    return session.scalar(select(Context.content).where(Context.digest == digest))


def drop_unused(session: Session) -> None:
    """Delete the archives of no experiment but deleted ones."""
    used = select(Experiment.context).where(Experiment.context.is_not(None), Experiment.state != "DELETED")
    session.execute(delete(Context).where(Context.digest.not_in(used)))
