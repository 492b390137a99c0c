"""The embedded master of a home folder: found, started in the background where there is none, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import det_core
from det_core._clock import monotonic
from det_core._optional import check_installed
from det_core.client._address import kept_token, master_folder, running
from det_core.errors import MasterUnreachable
from det_core.storage import Owner

START_TIMEOUT = 60.0
"""Seconds that a master has to begin to listen."""
STOP_TIMEOUT = 30.0
"""Seconds that a master has to end after it was told to."""
LAST_LINES = 8
_POLL = 0.01
_REFUSAL = "det_core.master: error: "
"""What stands before the reason in the log of a master that could not be started."""


def ensure_master(home: Path, timeout: float = START_TIMEOUT, options: Sequence[str] = ()) -> tuple[str, str]:
    """The address of a home folder's master, and the user's token. It is started if it does not run.

    Many may call this at a time, in any number of processes: one master is started.

    Args:
        home: the home folder.
        timeout: seconds that it may take.
        options: what to start it with, as ``["--slots", "2"]``; one that runs already is left as it is.

    Raises:
        MasterUnreachable: it could not be started (as there is one on another machine, say); the message ends in the
            last lines of its log.
    """
    folder = master_folder(home)
    found = living(folder)
    if found is None:
        found = _started(home, folder, timeout, options)
    token = kept_token(folder)
    if token is None:
        raise MasterUnreachable(f"the master at {found['url']} keeps no token in {folder / 'token'}")
    return str(found["url"]), token


def living(folder: Path) -> dict[str, Any] | None:
    """What the master of a home folder says of itself, if it is a process of this machine that lives; else None."""
    told = running(folder)
    owner = _owner(told)
    return told if owner is not None and owner.is_here() and not owner.is_dead() else None


def has_died(folder: Path) -> bool:
    """Whether the master of a home folder has ended on this machine without a word, as by a kill."""
    owner = _owner(running(folder))
    return owner is not None and owner.is_here() and owner.is_dead()


def stop_master(home: Path, timeout: float = STOP_TIMEOUT) -> bool:
    """Stop a home folder's master; trials go on, and the next master finds them.

    Returns:
        Whether there was one.

    Raises:
        MasterUnreachable: it does not end.
    """
    folder = master_folder(home)
    owner = _owner(living(folder))
    if owner is None:
        return False
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    deadline = monotonic() + timeout
    while not owner.is_dead():
        if monotonic() > deadline:
            raise MasterUnreachable(f"the master (pid {owner.pid}) did not end within {timeout:g} s; kill {owner.pid}")
        time.sleep(_POLL)
    return True


def _owner(told: dict[str, Any] | None) -> Owner | None:
    try:
        assert told is not None
        return Owner("", 0, str(told["host"]), int(told["pid"]), int(told["start_time"]))
    except (AssertionError, LookupError, TypeError, ValueError):
        return None


def _started(home: Path, folder: Path, timeout: float, options: Sequence[str]) -> dict[str, Any]:
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise MasterUnreachable(
            f"a master cannot keep its files in {folder}: {e.strerror}. Set DET_CORE_HOME to a folder of yours"
        ) from None
    deadline = monotonic() + timeout
    try:
        with FileLock(folder / "start.lock", timeout=timeout, poll_interval=0.02):
            return living(folder) or _start(home, folder, deadline, options)
    except Timeout:
        raise MasterUnreachable(f"somebody else has been starting the master of {home} for {timeout:g} s") from None


def _start(home: Path, folder: Path, deadline: float, options: Sequence[str]) -> dict[str, Any]:
    check_installed(
        "fastapi", "uvicorn", "sqlalchemy", "alembic", "pydantic", "ruamel.yaml", extra="master", purpose="a master"
    )
    log = folder / "master.log"
    with open(log, "ab") as output:
        began = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "det_core.master", "--home", str(home), "--log-file", str(log), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=Path(det_core.__file__).parent.parent,
            start_new_session=True,
        )
    while (found := living(folder)) is None:
        status = process.poll()
        if status is not None and (found := living(folder)) is None:
            raise MasterUnreachable(f"the master of {home} {_why_ended(log, began, status)}")
        if monotonic() > deadline:
            process.terminate()
            raise MasterUnreachable(f"the master of {home} does not answer:\n{_told(_tail(log, began))}")
        time.sleep(_POLL)
    process.returncode = 0  # it goes on when this process ends
    return found


def _why_ended(log: Path, began: int, status: int) -> str:
    """How a master ended that did not begin to listen: in its own words, if it had some."""
    lines = _tail(log, began)
    _, refused, why = lines[-1].partition(_REFUSAL) if lines else ("", "", "")
    return f"cannot start: {why}" if refused else f"ended at once (exit status {status}):\n{_told(lines)}"


def _tail(log: Path, began: int) -> list[str]:
    """The last lines that this start has written, for an error."""
    try:
        with open(log, "rb") as file:
            file.seek(began)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as e:
        lines = [f"({log} cannot be read: {e.strerror})"]
    return lines[-LAST_LINES:] or [f"(nothing in {log})"]


def _told(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
