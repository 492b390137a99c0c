"""Changes are numbered: who waits misses none, and who comes back learns what changed, or that it must read anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

from det_core.master.service import _steering
from det_core.master.service._subscriptions import ANY, Cursor, Subscriptions
from support.mastered import bench, train, trials_of

SINGLE = {"name": "single", "max_length": 2}


def test_since_returns_each_changed_topic_once_in_order() -> None:
    changes = Subscriptions()
    changes.publish("before")
    cursor = changes.cursor
    assert changes.since(cursor) == []
    changes.publish("a", "b")
    changes.publish("a")
    assert changes.since(cursor) == ["b", "a"]
    assert changes.since(changes.cursor) == []


def test_since_tells_reader_that_is_too_far_behind_to_read_anew() -> None:
    changes = Subscriptions(max_topics=3)
    cursor = changes.cursor
    for _ in range(100):
        changes.publish("a", "b", "c")
    assert changes.since(cursor) == ["a", "b", "c"], "the same topics need no more room"
    late = changes.cursor
    changes.publish("d")
    assert changes.since(cursor) is None
    assert changes.since(late) == ["d"]
    assert changes.since(Cursor("another master", late.number)) is None
    assert changes.since(Cursor(late.start, late.number + 100)) is None


async def test_wait_returns_at_once_for_change_since_cursor() -> None:
    changes = Subscriptions(max_topics=1)
    cursor = changes.cursor
    changes.publish("a")
    assert await changes.wait("a", cursor, 60)
    assert not await changes.wait("b", cursor, 0)
    assert not await changes.wait("a", changes.cursor, 0.01)
    changes.publish("b")  # "a" is no longer kept
    assert await changes.wait("a", cursor, 60), "from a cursor that is too old, everything has changed"


async def test_publish_wakes_those_who_wait_for_topic_and_for_any() -> None:
    changes = Subscriptions()
    waits = [asyncio.create_task(changes.wait(topic, changes.cursor, 60)) for topic in ("a", "b", ANY)]
    await asyncio.sleep(0)
    changes.publish("a")
    assert [await waits[0], await waits[2]] == [True, True]
    assert not waits[1].done()
    changes.close()
    assert await waits[1] is False
    assert not await changes.wait("b", changes.cursor, 60), "nobody waits for a master that stops"


async def test_steps_of_an_experiment_are_published_after_they_are_recorded(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        changes = b.service.subscriptions
        cursor = changes.cursor
        number = await b.create(SINGLE)
        assert await b.ended(number) == "COMPLETED"
        (trial,) = await trials_of(b.service, number)
        changed = changes.since(cursor)
        assert changed is not None
        expected = {("experiment", number), ("trial", trial.id), ("metrics", trial.id)}
        assert expected <= set(changed)
        cursor = changes.cursor
        await _steering.patch_experiment(b.service, number, name="other")
        changed = changes.since(cursor)  # with its trial, whose checkpoints are removed meanwhile
        assert changed is not None and ("experiment", number) in changed
