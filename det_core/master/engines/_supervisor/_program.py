"""One allocation, from the start of its script to ``exit.json``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial

from det_core._standalone.files import sync_folder, write_atomic
from det_core._standalone.processes import (
    CannotRun,
    adopt_orphans,
    descendants,
    end_descendants,
    reap,
    send,
    set_parent_death_signal,
    spawn,
    start_time,
)

from . import LOCK
from ._log import LOG, LogWriter, OutputLog
from ._namespace import appear

GRACE_PERIOD = 2.0
"""Seconds between SIGTERM and SIGKILL."""
START = "start.json"
PROCESSES = "processes"
EXIT = "exit.json"
ROOM = "exit.json.room"
"""File that holds the room for ``exit.json`` until then, so that a full disk cannot keep the end from being written."""
ROOM_BYTES = 4096
_POLL_INTERVAL = 0.1
_READ_BYTES = 64 * 1024
_DRAIN_TIMEOUT = 60.0
_NEVER = float("inf")


class Supervisor:
    """Runs the allocation of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with open(os.path.join(folder, START)) as file:
            self._words = json.load(file)
        self._log = OutputLog(LogWriter(os.path.join(folder, LOG), self._words["node"], "supervisor"))
        self._streams: dict[int, str] = {}
        self._poll = select.poll()
        self._order = 0
        self._end_at = _NEVER
        self._force_at = _NEVER
        self._killed = False

    def run(self) -> None:
        """Run the script to its end, and write that down."""
        facts: dict[str, object] = {"status": None, "signal": None, "started": False}
        try:
            self._read_order()
            if time.monotonic() >= self._end_at:
                self._killed = True
            else:
                status = self._watch(self._start())
                facts.update(started=True)
                facts["signal" if status < 0 else "status"] = abs(status)
        except CannotRun as e:
            facts.update(status=e.status, started=True, error=str(e))
        except subprocess.SubprocessError as e:
            facts.update(status=126, started=True, error=f"cannot run the script in its work directory: {e}")
        # Whatever the script has left behind would hold its slots.
        end_descendants()
        self._drain()
        self._log.close()
        facts.update(killed=self._killed, lost_bytes=self._log.lost, time=time.time())
        # Last: once it is there, the log is whole.
        write_exit(self._folder, facts)

    def _start(self) -> int:
        """Start the script; return its process ID, which is its session's, too."""
        pipes = {"stdout": os.pipe(), "stderr": os.pipe()}
        for stream, (source, _) in pipes.items():
            self._streams[source] = stream
            self._poll.register(source, select.POLLIN)
        words = self._words
        run = partial(spawn, words["command"], words["environment"], pipes["stdout"][1], pipes["stderr"][1])
        try:
            try:
                pid = run(prepare=partial(self._enter, os.getpid()))
            except subprocess.SubprocessError:  # no namespace may be made here
                pid = run(prepare=partial(os.chdir, os.path.join(self._folder, "work")))
        finally:
            for _, target in pipes.values():
                # The script has its own copies; the end of its output would never be seen otherwise.
                os.close(target)
        write_processes(self._folder, supervisor=os.getpid(), script=pid)
        return pid

    def _enter(self, supervisor: int) -> None:
        """Have the child that is to be the script see the information files at the contract's path."""
        work = os.path.join(self._folder, "work")
        appear(os.path.join(self._folder, "info"), work, os.path.join(self._folder, "stage"))
        # A new user namespace comes with new credentials, at which the kernel clears this signal (commit_creds).
        set_parent_death_signal(signal.SIGKILL)
        # It died before the signal was set, so that nobody would log or end this script.
        if os.getppid() != supervisor:
            os._exit(127)
        os.chdir(work)

    def _watch(self, script: int) -> int:
        """Log output and obey until the script has ended; return its status, negative for a signal."""
        with suppress(OSError):  # a kernel before 5.3, or a sandbox: the next look finds the end
            self._poll.register(os.pidfd_open(script), select.POLLIN)
        while True:
            self._read_output(_POLL_INTERVAL)
            ended = reap() or {}
            if script in ended:
                return os.waitstatus_to_exitcode(ended[script])
            self._read_order()
            self._enforce()
            self._log.flush()

    def _read_output(self, timeout: float) -> bool:
        """Log what comes within this time; return whether anything did."""
        found = False
        for fd, _ in self._poll.poll(timeout * 1000):
            if fd not in self._streams:
                continue
            found = True
            data = os.read(fd, _READ_BYTES)
            if data:
                self._log.add(self._streams[fd], data)
            else:
                # All who could write have closed it; poll() would report it at once, again and again.
                self._poll.unregister(fd)
                os.close(fd)
                del self._streams[fd]
        return found

    def _drain(self) -> None:
        """Log what is left in the pipes; a process that still holds them, of another user, is not waited for."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT
        while self._streams and time.monotonic() < deadline:
            if not self._read_output(0.0):
                break

    def _read_order(self) -> None:
        """Look for a new order to end. Its seconds count from here, by this clock; an earlier deadline stands."""
        with suppress(OSError, ValueError):
            with open(os.path.join(self._folder, "kill")) as file:
                number, seconds = file.read().split()
            # The same order is read at each look, and its seconds must not begin anew.
            if int(number) > self._order:
                self._order = int(number)
                self._end_at = min(self._end_at, time.monotonic() + float(seconds))

    def _enforce(self) -> None:
        """Send SIGTERM to all at the deadline, and SIGKILL after the grace period."""
        now = time.monotonic()
        if now >= self._force_at:
            self._send_all(signal.SIGKILL)  # at each look, for those that were being born
        elif now >= self._end_at and not self._killed:
            self._killed = True
            self._force_at = now + GRACE_PERIOD
            self._send_all(signal.SIGTERM)
            # A stopped process does not see the first signal.
            self._send_all(signal.SIGCONT)

    def _send_all(self, signum: int) -> None:
        for pid in descendants():
            send(pid, signum)


def write_processes(folder: str, **pids: int) -> None:
    """Write who runs, each with its start time, which tells it from a later process of the same ID."""
    found: dict[str, object] = {name: [pid, start_time(pid)] for name, pid in pids.items()}
    with suppress(OSError):  # the disk is full: the lock and the variables of the processes must do
        content = json.dumps({"boot": boot_id(), **found}).encode()
        write_atomic(os.path.join(folder, PROCESSES), content, durable=False)


def boot_id() -> str:
    """Return what tells this start of the machine from others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def take_room(folder: str) -> None:
    """Take the room for ``exit.json``. Raise OSError if there is none."""
    write_atomic(os.path.join(folder, ROOM), b" " * ROOM_BYTES, durable=True)


def write_exit(folder: str, facts: dict[str, object]) -> None:
    """Write how it ended, durably; whole or not at all."""
    if isinstance(facts.get("error"), str):
        facts["error"] = str(facts["error"])[: ROOM_BYTES // 8]  # six bytes a character at most, escaped
    room = os.path.join(folder, ROOM)
    if not os.path.exists(room):
        take_room(folder)
    fd = os.open(room, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, json.dumps(facts).encode(), 0)  # blanks behind it are JSON, too
        os.fsync(fd)
    finally:
        os.close(fd)
    # Written into the room that was taken at the start: no byte is needed now.
    os.replace(room, os.path.join(folder, EXIT))
    sync_folder(folder)


def main(folder: str) -> None:
    """Run the allocation of ``folder``."""
    os.set_inheritable(LOCK, False)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # whoever sends them to all ends the script, too
        signal.signal(signum, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited by the script
    os.chdir(folder)
    # A grandchild whose parent has ended becomes a child of this process, and can be found and ended.
    adopt_orphans()
    write_processes(folder, supervisor=os.getpid())
    Supervisor(folder).run()
