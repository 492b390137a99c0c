"""Tokens, of which only digests are stored."""

from __future__ import annotations

import hashlib

from sqlalchemy import delete
from sqlalchemy.orm import Session

from det_core.master.store.models import Token


def add(session: Session, token: str, *, allocation_id: str, trial_id: int, experiment_id: int) -> None:
    """Admit the token of an allocation."""
    row = Token(
        digest=_digest(token),
        kind="allocation",
        allocation_id=allocation_id,
        trial_id=trial_id,
        experiment_id=experiment_id,
    )
    session.add(row)


def find(session: Session, token: str) -> Token | None:
    """Return the owner of a token; None if it is unknown, or was revoked."""
    return session.get(Token, _digest(token))


def revoke(session: Session, *, allocation_id: str) -> None:
    """Admit the tokens of an allocation no more."""
    session.execute(delete(Token).where(Token.allocation_id == allocation_id))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
