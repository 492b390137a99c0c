"""Workers of a DataLoader that leave stop signals to their parent, with fork, spawn and forkserver.

A scheduler, systemd or a terminal signals every process of a job. A worker of torch dies of that: of SIGTERM by a C
handler that ignores only signals of the parent, of the others by default. The parent's next batch is then an error, and
nothing is saved. Workers below a process that has called :func:`protect_workers` ignore stop signals until their loader
terminates them, and end with that process.

The code gets into a worker

- with fork, by multiprocessing's own hook after a fork;
- with spawn and forkserver, in its parent's ``authkey``, which a child unpickles twice: before it imports the script,
  where it starts to collect signals, and within the process object, where it becomes a worker or restores everything.
  The forkserver itself must live, as its children end with it: it is started with stop signals blocked; its children,
  which inherit that, unblock them.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess, get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Event
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from det_core._forks import ForkGuard
from det_core._standalone.stop_signals import STOP_SIGNALS

_LOADERS = ("torch.utils.data.", "torchdata.")
"""Packages whose daemonic processes are workers of a loader."""
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)
"""Size of the handler at the start of a ``struct sigaction``."""
_TORCH_CALL = "_set_worker_signal_handlers"
_START_INTERVAL = 0.005
_START_TIMEOUT = 10.0
"""Time in which torch is expected to install its SIGTERM handler in a started worker, in seconds."""
_CHECK_INTERVAL = 1.0
_EXIT_TIMEOUT = 1.0
"""Maximum time for workers to end after their parent, in seconds; one that holds the GIL for ever is killed."""
_ARRIVE = """
import signal, sys
sys.path[:] = path  # as multiprocessing does a moment later
try:
    from det_core.core._worker_signals import arrive
except ImportError:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
else:
    arrive(lifeline, blocked)
"""
_SETTLE = """
import sys
if module := sys.modules.get("det_core.core._worker_signals"):
    module.settle(is_worker)
"""


def protect_workers() -> None:
    """Protect the future workers of this process's loaders from stop signals. Any thread may call it."""
    global _parent
    if _parent is not None and _parent.pid == os.getpid():
        return
    _parent = _Parent()
    _parents.add(_parent)
    register_after_fork(_parent, _Parent.after_fork)
    ForkingPickler.register(type(multiprocessing.current_process().authkey), _reduce_authkey)
    for kind in (SpawnProcess, ForkServerProcess):
        ForkingPickler.register(kind, _reduce_process)
    atexit.register(_parent.end_workers)


class _Parent:
    """A process that protects its workers.

    Each worker holds the read end of one pipe, and only this process the write end: end of file means that the process
    has ended, or is about to.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lifeline, self._held = multiprocessing.Pipe(duplex=False)
        self.starts: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Children that are being started: True for a worker."""

    def after_fork(self) -> None:
        """Protect this process if it is a worker that multiprocessing has forked."""
        if self.pid == os.getppid():
            if _is_worker(multiprocessing.current_process()):
                _become_worker(self.lifeline)
            else:
                self.lifeline.close()

    def release(self) -> None:
        """Close the write end in a forked child."""
        self._held.close()

    def end_workers(self) -> None:
        """End the workers at exit, as multiprocessing would join its daemonic children without a timeout."""
        if self.pid != os.getpid():
            return
        self._held.close()
        workers = [child for child in multiprocessing.active_children() if child.daemon and self._has_worker(child)]
        if not workers:
            return
        # The handler of torch raises when a worker was killed.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        signal.signal(signal.SIGCHLD, handler)

    def _has_worker(self, child: Any) -> bool:
        """Return whether a child is a protected worker: it has the lifeline open, which all others have closed."""
        pipe = os.fstat(self.lifeline.fileno()).st_ino
        try:
            return any(entry.stat().st_ino == pipe for entry in os.scandir(f"/proc/{child.pid}/fd"))
        except OSError:  # it has just ended
            return False


def _reduce_authkey(key: Any) -> tuple[Any, ...]:
    """Pickle the key that every child of spawn and forkserver receives, with code that runs there."""
    plain: tuple[Any, ...] = key.__reduce__()  # raises TypeError unless a child is being started
    start: Any = get_spawning_popen()
    if _parent is None or _parent.pid != os.getpid() or start.method not in ("spawn", "forkserver"):
        return plain
    if start in _parent.starts:
        return (*plain, {"det_core": _Executed(_SETTLE, {"is_worker": _parent.starts[start]})})
    _parent.starts[start] = False
    blocked: tuple[int, ...] = ()
    if start.method == "forkserver":
        blocked = STOP_SIGNALS
        with _stop_signals_blocked():
            forkserver.ensure_running()
    namespace = {"path": list(sys.path), "lifeline": _parent.lifeline, "blocked": blocked}
    return (*plain, {"det_core": _Executed(_ARRIVE, namespace)})


def _reduce_process(process: Any) -> Any:
    """Pickle a process as usual, and remember for its key, which follows, whether it is a worker."""
    if _parent is not None:
        _parent.starts[get_spawning_popen()] = _is_worker(process)
    return process.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _Executed:
    """Code that runs where it is unpickled. Without an import of det_core, which might fail there."""

    def __init__(self, code: str, namespace: dict[str, Any]) -> None:
        self._arguments = (code, namespace)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, self._arguments


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# In a child


def arrive(lifeline: Connection, blocked: tuple[int, ...]) -> None:
    """Collect signals in a child of spawn or forkserver until it has imported the script."""
    global _arrival
    _arrival = _Arrival(lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def settle(is_worker: bool) -> None:
    """Make a child that has imported the script a worker, or restore what :func:`arrive` has changed."""
    global _arrival
    arrival = _arrival
    _arrival = None
    if arrival is None:
        return
    if is_worker:
        _become_worker(arrival.lifeline)
    else:
        arrival.lifeline.close()
        arrival.restore()


class _Arrival:
    """Signal handlers of a child of spawn or forkserver until it is known whether it is a worker of a loader."""

    def __init__(self, lifeline: Connection) -> None:
        self.lifeline = lifeline
        self._received: list[int] = []
        self._replaced = {number: signal.getsignal(number) for number in STOP_SIGNALS if _is_default(number)}
        for number in self._replaced:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)

    def restore(self) -> None:
        """Put back the handlers that were found, and send this process the received signals again."""
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        for received in self._received:
            os.kill(os.getpid(), received)


def _become_worker(lifeline: Connection) -> None:
    for number in STOP_SIGNALS:
        # torch replaces the handler of SIGTERM, whatever it finds.
        if number == signal.SIGTERM or _is_default(number):
            # Neither a mask nor SIG_IGN: a program that the worker starts would inherit those.
            signal.signal(number, _leave_to_parent)
    guard = _Guard(lifeline)
    threading.Thread(target=guard.run, name="det-core-worker", daemon=True).start()
    if sys.getprofile() is None:
        sys.setprofile(guard.on_call)


def _is_worker(process: Any) -> bool:
    module = getattr(getattr(process, "_target", None), "__module__", None) or ""
    return bool(process.daemon) and module.startswith(_LOADERS)


def _is_default(number: int) -> bool:
    handler = signal.getsignal(number)
    if isinstance(getattr(handler, "__self__", None), _Arrival):
        return True
    return handler in (signal.SIG_DFL, signal.default_int_handler)


def _leave_to_parent(_number: int, _frame: FrameType | None) -> None:
    pass


class _Guard:
    """Thread of a worker that keeps torch from handling SIGTERM, and ends the worker with its parent.

    torch installs its handler in C, unknown to Python, once the worker runs; so Python's own is put back in C. A
    profile function does it the moment that torch's call returns, as on a busy machine the thread may run after the
    first batches. The thread does it for a torch that names this call otherwise.

    Once the loader terminates the worker, torch's handler is put back, which obeys ``terminate()``.
    """

    def __init__(self, lifeline: Connection) -> None:
        self._lifeline = lifeline
        self._ours = _sigaction(signal.SIGTERM)
        self._theirs: bytes | None = None
        self._start_deadline = time.monotonic() + _START_TIMEOUT

    def run(self) -> None:
        """Guard until the parent has ended."""
        while not self._lifeline.poll(self._interval):
            if self._theirs is None:
                self._replace_torch_handler()
            elif _is_terminated():
                _sigaction(signal.SIGTERM, self._theirs)
                self._lifeline.poll(None)
                break
        os._exit(0)

    def on_call(self, _frame: FrameType | None, event: str, called: Any) -> None:
        """Replace torch's handler once it is installed, as a profile function of the main thread, and uninstall it."""
        if event == "c_return" and getattr(called, "__name__", "") == _TORCH_CALL:
            self._replace_torch_handler()
        if self._theirs is not None:
            sys.setprofile(None)

    @property
    def _interval(self) -> float:
        if self._theirs is None and time.monotonic() < self._start_deadline:
            return _START_INTERVAL
        return _CHECK_INTERVAL

    def _replace_torch_handler(self) -> None:
        action = _sigaction(signal.SIGTERM)
        # Only the pointers: after the 64 signals of the kernel's mask, glibc returns what was on its stack.
        is_replaced = action[:_POINTER_BYTES] != self._ours[:_POINTER_BYTES]
        if is_replaced and signal.getsignal(signal.SIGTERM) is _leave_to_parent:
            self._theirs = action
            _sigaction(signal.SIGTERM, self._ours)


def _is_terminated() -> bool:
    """Return whether the loader has set the one event that it passes to its workers, which tells them to end."""
    process: Any = multiprocessing.current_process()
    events = [value for value in getattr(process, "_args", ()) if isinstance(value, Event)]
    return any(event.is_set() for event in events)


def _sigaction(number: int, action: bytes | None = None) -> bytes:
    """Set the kernel's action for a signal, unknown to Python; return the previous one, a ``struct sigaction``."""
    before = ctypes.create_string_buffer(256)  # 152 bytes with glibc on x86-64
    if _LIBC.sigaction(number, action, before) != 0:
        raise OSError(ctypes.get_errno(), "sigaction")
    return before.raw


_LIBC = ctypes.CDLL(None, use_errno=True)
_parent: _Parent | None = None
_arrival: _Arrival | None = None

# Any child, and not only one of multiprocessing, would keep the pipe of its dead parent open.
_parents = ForkGuard(_Parent.release)
