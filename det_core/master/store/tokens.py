"""Tokens, of which only digests are kept."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from det_core import _clock
from det_core.master.store._rows import one, put
from det_core.master.store._schema import TOKENS


@dataclass(frozen=True)
class TokenRow:
    """Whom a token belongs to: ``kind`` is ``user`` or ``allocation``."""

    digest: str
    kind: str
    allocation_id: str | None
    trial_id: int | None
    experiment_id: int | None
    create_time: float


def add(
    session: Session,
    token: str,
    kind: str,
    *,
    allocation_id: str | None = None,
    trial_id: int | None = None,
    experiment_id: int | None = None,
) -> None:
    """Let ``token`` in."""
    put(session, TOKENS, vars(TokenRow(_digest(token), kind, allocation_id, trial_id, experiment_id, _clock.now())))


def find(session: Session, token: str) -> TokenRow | None:
    """Whom a token belongs to; None if it is none, or was revoked."""
    return one(session, select(TOKENS).where(TOKENS.c.digest == _digest(token)), TokenRow)


def revoke(session: Session, *, allocation_id: str) -> None:
    """Let the tokens of an allocation in no more."""
    session.execute(delete(TOKENS).where(TOKENS.c.allocation_id == allocation_id))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
