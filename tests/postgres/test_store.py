"""What PostgreSQL can do otherwise than SQLite: transactions and isolation, locks, types, order, ids, the schema.

The tests are those of tests/fast/master/store.
"""

from __future__ import annotations

import asyncio

from det_core.errors import StoreError
from det_core.master.store import Store, key_values
from fast.master.store.test_store import (
    put,
)
from support.postgres import Postgres

__all__ = [name for name in dir() if name.startswith("test_")]


def test_a_lost_connection_is_an_error_and_the_next_work_gets_a_new_one(postgres_server: Postgres) -> None:
    store = Store.open(postgres_server.new_schema())

    async def go() -> None:
        await store.write(put("a"))
        others = "datname = 'postgres' AND pid <> pg_backend_pid()"
        end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
        await asyncio.to_thread(postgres_server.execute, end)
        try:
            await store.write(put("b"))  # may have found the new connection already
        except StoreError as e:
            assert "postgresql" in str(e)
        await store.write(put("c"))
        assert await store.read(lambda conn: [key_values.get(conn, key) for key in "ac"]) == [1, 1]

    asyncio.run(go())
    store.close_now()
