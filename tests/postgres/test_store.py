"""Differences between PostgreSQL and SQLite: transactions and isolation, locks, types, order, ids, the schema.

The tests are those of tests/fast/master/store.
"""

# ruff: noqa: F401 (pytest collects what is imported)
from __future__ import annotations

import asyncio

import pytest

from det_core.errors import StoreError, StoreLocked
from det_core.master.store import Store
from fast.master.store.test_killed import test_what_was_answered_survives_kill_9
from fast.master.store.test_metrics_journal import (
    test_a_series_is_read_in_pages,
    test_numbers_that_are_not_finite_come_back_as_numbers,
    test_odd_values_come_back_as_they_were,
    test_records_are_kept_once_however_often_and_late_they_arrive,
    test_what_each_process_writes_is_its_own,
)
from fast.master.store.test_metrics_reported import (
    test_a_later_run_takes_the_place_of_an_earlier_one_from_its_steps_on,
    test_another_value_is_a_conflict_and_nothing_of_it_is_kept,
    test_samples_of_the_machine_are_kept_raw,
)
from fast.master.store.test_migrate import (
    test_database_without_its_version_is_refused,
    test_empty_database_gets_newest_schema,
    test_newer_schema_is_refused_with_version_that_wrote_it,
    test_schema_that_fails_leaves_nothing,
)
from fast.master.store.test_reports import (
    test_a_checkpoint_is_registered_once,
    test_the_latest_is_the_complete_one_of_the_most_steps,
    test_what_belongs_to_a_deleted_experiment_goes_and_nothing_else,
)
from fast.master.store.test_store import (
    put,
    test_a_read_sees_one_state_of_the_database,
    test_a_second_master_is_refused_until_the_first_has_died,
    test_a_work_sees_what_those_before_it_wrote,
    test_a_work_that_fails_harms_no_other,
    test_close_does_what_was_asked_for,
    test_readers_cannot_write,
    test_who_is_cancelled_leaves_the_others_alone,
)
from fast.master.store.test_subjects import (
    test_a_trial_is_created_once_and_changed,
    test_an_archive_is_kept_once_while_it_is_used,
    test_an_experiment_is_created_changed_and_found,
    test_change_writes_without_loading,
    test_equal_storages_have_one_id,
    test_events_are_counted_in_each_experiment,
    test_experiments_are_found_by_state_and_name,
    test_the_last_operation_is_current,
)
from fast.master.store.test_validations import (
    searching,
    test_columns_follow_reports,
    test_nan_is_the_worst_of_validations,
    test_trials_are_ordered_by_their_best,
)
from support import key_values
from support.postgres import Postgres
from support.processes import until


def test_write_lost_connection_raises_and_next_reconnects(postgres_server: Postgres) -> None:
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
        assert await store.read(lambda session: [key_values.get(session, key) for key in "ac"]) == [1, 1]

    asyncio.run(go())
    store.close_now()


def test_lock_lost_by_restart_is_taken_again_or_ends_the_master(
    postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.master.store._store.LOCK_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr("det_core.master.store._database.SERVER_LOCK_TIMEOUT", 0.1)
    url = postgres_server.new_schema()
    idle = Store.open(url)
    locks = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
    holder = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"

    async def go() -> None:
        keeper = asyncio.create_task(idle.keep_lock())
        before = await asyncio.to_thread(postgres_server.execute, holder)
        await asyncio.to_thread(postgres_server.execute, locks)
        await asyncio.to_thread(until, lambda: postgres_server.execute(holder) not in ([], before))
        with pytest.raises(StoreLocked):
            await asyncio.to_thread(Store.open, url)
        keeper.cancel()
        await asyncio.to_thread(postgres_server.execute, locks)
        second = await asyncio.to_thread(Store.open, url)
        with pytest.raises(StoreLocked):
            await asyncio.wait_for(idle.keep_lock(), 30)
        await second.close()

    asyncio.run(go())
    idle.close_now()
