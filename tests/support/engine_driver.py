"""A master in small: an engine, and a record of what it says. To be killed and started again.

``python engine_driver.py HOME PLAN RECORD``: runs what PLAN says (JSON: id -> shell script), and appends each
event to RECORD in one write. Ends once all has.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from det_core.master.engines import Claim, LocalEngine, Slots, Ticket


class Record:
    """Events recorded in this life and in earlier ones."""

    def __init__(self, path: Path) -> None:
        self.entries = entries(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._fd, b"\n")  # what was torn ends here

    def add(self, kind: str, allocation_id: str, **what: Any) -> None:
        entry = {"kind": kind, "id": allocation_id, "life": os.getpid(), **what}
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        self.entries.append(entry)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] == kind]

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        return Claim("token of the node", "token")

    async def open_context(self, digest: str) -> IO[bytes]:
        raise AssertionError("no plan has a context")

    async def deliver(self, *_: object) -> int:
        raise AssertionError("this machine has the master's folders")

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        self.add("journal", allocation_id, records=[dict(record) for record in records])

    async def reports(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        self.add("reports", allocation_id, records=[dict(record) for record in records])


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a record, without a line torn by a kill."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"}")]


async def main(home: Path, plan: Path, path: Path) -> None:
    record = Record(path)
    scripts: dict[str, str] = json.loads(plan.read_text())
    launched = {entry["id"] for entry in record.of("launch")}
    done = set()
    engine = LocalEngine(home, Slots(2))
    await engine.recover(dict.fromkeys(launched), record, {})
    for name, script in scripts.items():
        if name not in launched:
            record.add("launch", name)
            await engine.launch(_spec(name, script))
    async for event in engine.events():
        record.add("ended", event.allocation_id, exit=asdict(event.exit))
        done.add(event.allocation_id)
        if done >= scripts.keys():
            break
    for name in scripts:
        await engine.forget(name)
    await engine.close()


def _spec(name: str, script: str) -> Ticket:
    return Ticket(
        name, name[:-2], 1, 1, 1, 1, {}, {}, 1, [0], "http://127.0.0.1:8080", ["sh", "-c", script], "code"
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
