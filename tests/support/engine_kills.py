"""kill -9 of allocations, supervisors and masters at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from det_core.master.engines import Position, TrialLog
from det_core.master.engines._folder import AllocationFolder
from det_core.master.engines._watch import find_processes
from support import engine_driver

COUNT = 200
SCRIPT = (
    "(setsid sleep 1000 & echo $! >> {pids}); echo $$ >> {pids};"
    f"i=0; while [ $i -lt {COUNT} ]; do i=$((i+1)); echo line $i; [ $((i % 10)) = 0 ] && sleep 0.03; done; exit 3"
)
VICTIMS = ("supervisor", "supervisor", "script", "driver", "driver", "driver and supervisor", "all")
ALLOCATIONS = 5


def kill_at_random(folder: Path, seed: int) -> None:
    """Run five allocations, and kill each once."""
    dice = random.Random(seed)
    names = [f"1.a{i}.1" for i in range(ALLOCATIONS)]
    (folder / "plan").write_text(json.dumps({name: SCRIPT.format(pids=folder / "pids") for name in names}))
    moments = sorted((dice.uniform(0.2, 2.0), dice.choice(VICTIMS), name) for name in names)
    print(moments)
    driver = start(folder)
    began = time.monotonic()
    for at, victim, name in moments:
        time.sleep(max(began + at - time.monotonic(), 0))
        if "driver" in victim or victim == "all":
            driver.kill()
            driver.wait()
        kill(AllocationFolder(folder / "home" / "master" / "allocations" / name), victim)
        if driver.poll() is not None:
            driver = start(folder)
    assert driver.wait() == 0
    check(folder, names)


def start(folder: Path) -> subprocess.Popen[bytes]:
    arguments = [str(folder / name) for name in ("home", "plan", "record")]
    return subprocess.Popen([sys.executable, engine_driver.__file__, *arguments])


def kill(folder: AllocationFolder, victim: str) -> None:
    """Kill processes of an allocation, if they are there by now."""
    wanted = {
        "supervisor": ["supervisor"],
        "script": ["script"],
        "driver": [],
        "driver and supervisor": ["supervisor"],
        "all": ["supervisor", "script"],
    }[victim]
    known = folder.processes()
    if folder.is_live or victim == "script":
        for name in wanted:
            if name in known:
                with suppress(ProcessLookupError):
                    os.kill(known[name][0], signal.SIGKILL)


def check(folder: Path, names: list[str]) -> None:
    record = engine_driver.entries(folder / "record")
    for name in names:
        exits = [entry for entry in record if entry["kind"] == "ended" and entry["id"] == name]
        lives = [entry["life"] for entry in exits]
        assert lives and len(set(lives)) == len(lives), f"{name} ended {len(lives)} times"
        assert all(entry["exit"] == exits[0]["exit"] for entry in exits if entry["exit"]["cause"] == "NONE")
        log = TrialLog(folder / "home" / "master" / "allocations", name[:-2], 1)
        lines = [line.line.text for line in log.read(Position()).lines]
        assert lines == [f"line {i}" for i in range(1, len(lines) + 1)]
        if exits[0]["exit"]["status"] == 3:
            assert len(lines) == COUNT
        else:
            exit = exits[0]["exit"]
            assert exit["cause"] in ("LOST", "NOT_STARTED") or exit["signal"] == signal.SIGKILL, exits
        assert not find_processes(AllocationFolder(folder / "home" / "master" / "allocations" / name))
    alive = [pid for pid in (folder / "pids").read_text().split() if Path(f"/proc/{pid}").exists()]
    assert not [pid for pid in alive if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]
