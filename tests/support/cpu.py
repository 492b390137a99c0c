"""CPU seconds of a test run: a line at its end, and ``.stats/TARGET.json`` of a whole target for ``make stats``.

All below the test processes counts, once it was waited for or while it runs: pytest-xdist's workers, what they start,
what a server for all tests does for the one that runs, and orphans, which the test process adopts (``nest.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support import nest

BEGAN = time.monotonic()
STARTED = pytest.StashKey[tuple[float, float]]()
# Options of pytest by which a run is not of all tests below its arguments.
NARROWING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "maxfail", "collectonly")


def spent() -> tuple[float, float]:
    """Return the CPU seconds of this process, and of all below it, until now."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, ended.ru_utime + ended.ru_stime + _running(os.getpid())


def _running(parent: int) -> float:
    total = 0.0
    for pid in nest.children_of(parent):
        with contextlib.suppress(OSError):  # it has ended, and whoever waited for it has its time
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + _running(pid)
    return total


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown" and STARTED in item.stash:
        used = [round(now - then, 3) for now, then in zip(spent(), item.stash[STARTED], strict=True)]
        report.user_properties.append(("cpu", used))  # goes from the worker to the controller
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> Generator[None]:
    yield  # the workers have ended, and were waited for
    cpu, wall = sum(spent()), time.monotonic() - BEGAN
    terminalreporter.write_line(f"cpu: {cpu:.0f} s, wall: {wall:.0f} s")
    parts = [Path(word).parts for word in config.args]
    if len(parts) != 1 or len(parts[0]) != 2 or parts[0][0] != "tests" or exitstatus > pytest.ExitCode.TESTS_FAILED:
        return
    if not any(config.getoption(option, None) for option in NARROWING):
        stats = terminalreporter.stats
        record = {"ended": time.strftime("%Y-%m-%d %H:%M"), "CPU s": round(cpu, 1), "wall s": round(wall, 1)}
        record |= {outcome: len(stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")}
        reports = [r for some in stats.values() for r in some if getattr(r, "when", None) == "teardown"]
        record["tests"] = {r.nodeid: value for r in reports for key, value in r.user_properties if key == "cpu"}
        (config.rootpath / ".stats").mkdir(exist_ok=True)
        (config.rootpath / ".stats" / f"{parts[0][1]}.json").write_text(json.dumps(record))
