"""Tickets are claimed once a node, over the deaths of masters, by whoever has the code; an allocation is then ready."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import Conflict, Fenced, Forbidden
from det_core.master.engines import Piece, Pool, Ticket
from det_core.master.service import _access, _create, _queries, _steering, _tickets
from support.mastered import Bench, bench, config_of, train

SINGLE = {"name": "single", "max_length": 2}


async def held(b: Bench, pool: Pool, **config: Any) -> Ticket:
    """Create an experiment whose ticket the engine leaves to the test, and return that."""
    tickets: asyncio.Queue[Ticket] = asyncio.Queue()

    async def recover(*_: object) -> None:
        """Take it for running."""

    b.engine.recover = recover  # type: ignore[method-assign]
    b.engine.pool = pool
    b.engine.launch = tickets.put  # type: ignore[method-assign]
    await b.create(SINGLE, **config)
    return await tickets.get()


def claim(b: Bench, ticket: Ticket, node: int = 0, runner: str = "a", code: str = "") -> Any:
    return _tickets.EventListener(b.service).claim(ticket.allocation_id, node, code or ticket.code, runner)


async def state(b: Bench) -> str:
    return (await _queries.trial(b.service, 1)).state


async def test_ticket_is_json_without_files_of_the_master_or_credentials(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        ticket = await held(b, Pool(1), checkpoint_storage={"type": "s3", "bucket": "b"})
        text = ticket.to_json()
        assert Ticket.from_json(text) == ticket
        assert str(tmp_path) not in text
        assert set(json.loads(text)) == set(Ticket.__dataclass_fields__)
        granted = await claim(b, ticket)
        assert granted.token not in text and granted.session_token not in text


async def test_node_is_claimed_by_one_runner_with_the_code(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        ticket = await held(b, Pool(2, slots_per_node=1), resources={"slots_per_trial": 2})
        assert ticket.nodes == 2
        for node, code in ((0, "wrong"), (2, ticket.code), (-1, ticket.code)):
            with pytest.raises(Forbidden):
                await claim(b, ticket, node, code=code)
        first = await claim(b, ticket)
        assert await state(b) == "STARTING"
        await b.die()
        await b.start()
        with pytest.raises(Conflict):
            await claim(b, ticket, runner="b")
        again = await claim(b, ticket)
        assert first != again, "a repeat gets credentials of its own"
        assert await _access.identify(b.service, first.session_token) is not None
        await claim(b, ticket, 1, "b")
        assert await state(b) == "RUNNING"
        await b.die()
        await b.start()
        assert await state(b) == "RUNNING"


async def test_token_of_a_runner_is_not_the_scripts(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        ticket = await held(b, Pool(1))
        granted = await claim(b, ticket)
        deliver = partial(_tickets.EventListener(b.service).deliver, ticket.allocation_id)
        assert await deliver(0, granted.token, Piece("log/0.supervisor.0", b"line\n")) == 5
        for node, token in ((0, granted.session_token), (1, granted.token), (1, ""), (0, "")):
            with pytest.raises(Forbidden):
                await deliver(node, token, Piece("log/0.supervisor.0", b"other\n", 5))
        folder = tmp_path / "master" / "allocations" / ticket.allocation_id
        assert (folder / "log" / "0.supervisor.0").read_bytes() == b"line\n"
        assert await _access.identify(b.service, granted.token) is None


async def test_allocation_that_is_not_ready_is_killed_and_never_claimed(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        ticket = await held(b, Pool(1))
        await _steering.pause(b.service, 1)
        with pytest.raises(Fenced):
            await claim(b, ticket)
        assert b.service.live.allocations[ticket.allocation_id].row.kill_time is not None


async def test_allocation_that_has_ended_is_not_claimed(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        number = (await _create.create_experiment(b.service, json.dumps(config_of(SINGLE)))).id
        assert await b.ended(number) == "COMPLETED"
        with pytest.raises(Fenced):
            await claim(b, b.engine.launched[0])
