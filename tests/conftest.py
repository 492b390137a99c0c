"""What every test gets: a home folder of its own, and a check that nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.leftovers import processes_of
from support.servers import MARK, gcs_server, moto_server, rgw_server, s3_server
from support.turns import pytest_runtest_protocol

__all__ = ["gcs_server", "moto_server", "pytest_runtest_protocol", "rgw_server", "s3_server"]
# A machine with much else to do is no fault of a test.
settings.register_profile("det_core", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("det_core")
for _number in (signal.SIGINT, signal.SIGHUP):  # ignored in what nohup or a shell's & has started, and inherited
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(scope="session", autouse=True)
def event_loop() -> None:
    """fsspec's thread with its event loop, which live as long as the process: there before any test is looked at."""
    from fsspec.asyn import get_loop

    get_loop()


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail if a master, or what runs under one, of any test or fixture is there when all are over."""
    yield
    left = processes_of(tmp_path_factory.getbasetemp())
    assert not left, f"the tests leave behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def home(nothing_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``DET_CORE_HOME`` of this test; no variable of the outside that det_core reads."""
    for name in list(os.environ):
        if name.startswith(("DET_", "SLURM_", "OMPI_", "PMI", "HOROVOD_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "home"
    monkeypatch.setenv("DET_CORE_HOME", str(path))
    return path


@pytest.fixture(autouse=True)
def nothing_leaks(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves behind a thread, an open file, a process, a signal handler or a variable.

    A process is its child, or a master or trial of a home folder that the test has made.
    """
    threads, files, handlers, variables = _threads(), _files(), _handlers(), _variables()
    yield
    deadline = time.monotonic() + 5
    while (leaked := _leaks(threads, files) + _masters(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leaked, f"the test leaves behind: {', '.join(leaked)}"
    assert _handlers() == handlers, "the test leaves signal handlers behind"
    assert _variables() == variables, "the test leaves environment variables behind"


def _leaks(threads: set[int], files: set[str]) -> list[str]:
    left = [t for t in threading.enumerate() if t.ident not in threads]
    # The event loop keeps threads of its own, as many as it ever needed at a time.
    alive = [f"thread {t.name}" for t in left if not t.name.startswith("asyncio_")]
    return alive + [f"file {name}" for name in sorted(_files() - files)] + [f"process {p}" for p in _children()]


def _threads() -> set[int]:
    return {t.ident for t in threading.enumerate() if t.ident is not None}


def _files() -> set[str]:
    """Open regular files and sockets of this process, by what they are."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("/proc", "/dev", "/memfd:pytest", "pipe:")) or "/site-packages/" in target:
            continue
        found.add(f"{fd}:{target}")
    return found


def _children() -> list[str]:
    """Children that still run (multiprocessing's own helpers and the servers live as long as the session)."""
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                if f"{MARK}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    continue
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command and "resource_tracker" not in command and "forkserver" not in command:
                found.append(f"{pid} ({command.strip()[:120]})")
    return found


def _masters(folder: Path) -> list[str]:
    """Masters, and what runs under them, of home folders in a folder."""
    return [f"process {p}" for p in processes_of(folder)] if any(folder.glob("*/master")) else []


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}  # that one is pytest's own


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in _SIGNALS]
