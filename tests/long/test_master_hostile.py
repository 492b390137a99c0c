"""Two hundred hostile connections beside trials that report."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

from support.hostile import Api, Reporting, hostile_peers, long_log
from support.processes import until
from support.real_master import real_master

CLOSED_WITHIN = 75.0
MAX_GROWTH = 1.3


def test_hostile_connections_cost_no_report_and_are_closed(tmp_path: Path) -> None:
    with real_master(tmp_path / "home") as real:
        api = Api(real.url, real.token)
        trials = api.unmanaged_trials(20)
        path = long_log(api, trials[0], 10_000)
        with Reporting(api, trials) as reporting:
            until(lambda: sum(reporting.statuses.values()) > 400)
            with ThreadPoolExecutor(8) as pool:  # fill the caches that the first long reads need
                list(pool.map(lambda _: read(api, path), range(16)))
            before = memory(real.process.pid)
            idle = sockets(real.process.pid)
            began = time.monotonic()
            with hostile_peers(api, path, 200):
                peak = before
                while sockets(real.process.pid) > idle:
                    peak = max(peak, memory(real.process.pid))
                    left = sockets(real.process.pid) - idle
                    assert time.monotonic() < began + CLOSED_WITHIN, f"{left} are still open"
                    time.sleep(0.1)
                assert peak <= MAX_GROWTH * before, f"{peak / 1e6:.0f} MB of memory, {before / 1e6:.0f} before"
                count = sum(reporting.statuses.values())
                until(lambda: sum(reporting.statuses.values()) > count + 100)
        assert set(reporting.statuses) == {200}, reporting.statuses


def read(api: Api, path: str) -> None:
    """Read a log as an ordinary client does."""
    with requests.get(api.url + path, headers={"Authorization": f"Bearer {api.token}"}, stream=True) as answer:
        for _ in answer.iter_content(1 << 16):
            continue


def memory(pid: int) -> int:
    """Return the bytes of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def sockets(pid: int) -> int:
    """Return the number of sockets that a process has open."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += descriptor.readlink().name.startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return count
