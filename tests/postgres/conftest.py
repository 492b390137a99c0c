"""The fixtures of the store's tests, on PostgreSQL."""

from __future__ import annotations

import pytest

from det_core.master.store import METADATA
from det_core.master.store._database import parse, writing_engine
from det_core.master.store._migrate import upgrade
from fast.master.store.conftest import session, store, trial
from support.postgres import Postgres, postgres_server

__all__ = ["postgres_server", "session", "store", "trial"]


@pytest.fixture
def empty_url(postgres_server: Postgres) -> str:
    """Return the URL of an empty schema."""
    return postgres_server.new_schema()


@pytest.fixture(scope="session")
def schema(postgres_server: Postgres) -> str:
    """Return the URL of a newest schema, for many tests in turn."""
    url = postgres_server.new_schema()
    engine = writing_engine(parse(url))
    upgrade(engine)
    engine.dispose()
    return url


@pytest.fixture
def url(schema: str) -> str:
    """Return the URL of a database with the newest schema and nothing else in it."""
    engine = writing_engine(parse(schema))
    with engine.begin() as conn:
        conn.exec_driver_sql(f"TRUNCATE {', '.join(METADATA.tables)} RESTART IDENTITY")
    engine.dispose()
    return schema
