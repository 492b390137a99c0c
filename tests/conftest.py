"""Fixtures of every test: a home directory of its own, the end of all processes it started, a check for leaks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from det_core._env import LAUNCH_NAMES, LAUNCH_PREFIXES
from support import nest, warm
from support.processes import free_port
from support.servers import gcs_server, moto_server, rgw_server, s3_server

pytest_plugins = ["support.cpu", "support.timeouts"]
gc.disable()  # what importing all the tests makes stays: see pytest_collection_finish
__all__ = ["gcs_server", "moto_server", "rgw_server", "s3_server"]
nest.adopt_orphans()
free_port()  # locks this process's block, before any test looks at the open files
# A busy machine must not fail a test. The examples of a property are always the same: a change that breaks it is to be
# blamed, not a draw. tests/long draws anew.
settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")
for _number in (signal.SIGINT, signal.SIGHUP):  # ignored in what nohup or a shell's & has started, and inherited
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--shuffle SEED``: tests that pass in one order only fail some day."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="modules, and the tests of each, in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle; tests of a module stay together, as they share its fixtures."""
    if (seed := config.getoption("--shuffle")) is not None:
        places = {item.nodeid: random.Random(f"{seed} {item.nodeid}").random() for item in items}
        modules = {item.path: random.Random(f"{seed} {item.path.name}").random() for item in items}
        items.sort(key=lambda item: (modules[item.path], str(item.path), places[item.nodeid]))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never the million objects that exist by now."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session", autouse=True)
def event_loop() -> None:
    """Start threads with event loops, which live as long as the process, before any test is looked at."""
    from fsspec.asyn import get_loop

    from det_core.storage._calls import library_loop

    get_loop()
    library_loop()


@pytest.fixture(scope="session", autouse=True)
def gpu_driver() -> None:
    """Open the files that a GPU's driver opens when it is first used, and keeps as long as the process lives."""
    if Path("/dev/nvidiactl").exists():
        import pynvml
        import torch

        pynvml.nvmlInit()
        torch.zeros((), device="cuda" if torch.cuda.is_available() else None)


@pytest.fixture(scope="session", autouse=True)
def the_server_of_warm_scripts() -> Iterator[None]:
    """Close the server of warm scripts with the session."""
    yield
    warm.close()


@pytest.fixture(autouse=True)
def home(nothing_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set this test's ``DET_CORE_HOME``, and remove the outside variables that det_core reads."""
    for name in list(os.environ):
        if name in LAUNCH_NAMES or name.startswith(("DET_", *LAUNCH_PREFIXES)):
            monkeypatch.delenv(name)
    path = tmp_path / "home"
    monkeypatch.setenv("DET_CORE_HOME", str(path))
    return path


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """End what a test leaves running; fail one that leaves a thread, an open file, a signal handler or a variable."""
    threads, files, handlers, variables = _threads(), _files(), _handlers(), _variables()
    with nest.nested():
        yield
    deadline = time.monotonic() + 60  # threads that are about to end may wait for a processor
    while (leaked := _leaks(threads, files)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not leaked, f"the test leaves behind: {', '.join(leaked)}"
    assert _handlers() == handlers, "the test leaves signal handlers behind"
    assert _variables() == variables, "the test leaves environment variables behind"


def _leaks(threads: set[int], files: set[str]) -> list[str]:
    left = [t for t in threading.enumerate() if t.ident not in threads]
    # The event loop keeps threads of its own, as many as it ever needed at a time.
    alive = [f"thread {t.name}" for t in left if not t.name.startswith("asyncio_")]
    return alive + [f"file {name}" for name in sorted(_files() - files)]


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


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}  # that one is pytest's own


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in _SIGNALS]
