"""The embedded master of a home directory: found, started in the background if it does not run, and stopped."""

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
from det_core.client._master import master_folder, running, stored_token
from det_core.errors import MasterUnreachable
from det_core.storage import Owner

START_TIMEOUT = 60.0
"""Time that a master may take to begin to listen, in seconds."""
STOP_TIMEOUT = 30.0
"""Time that a master may take to end after SIGTERM, in seconds."""
LOCK_INTERVAL = 0.02
POLL_INTERVAL = 0.01
MAX_LOG_LINES = 8
"""Lines of its log in the error about a master that does not start."""
_REFUSAL = "det_core.master: error: "
"""Beginning of the line with the reason in the log of a master that could not be started."""


def ensure_master(home: Path, timeout: float = START_TIMEOUT, options: Sequence[str] = ()) -> tuple[str, str]:
    """Return the address of a home directory's master, and the user's token; start the master if it does not run.

    Several may call this at a time, in any number of processes: one master is started.

    Args:
        home: Home directory.
        timeout: Time that the start may take, in seconds.
        options: Options to start it with, as ``["--slots", "2"]``; one that runs already is left as it is.

    Raises:
        MasterUnreachable: If it could not be started (as one runs on another machine, say); the message ends in the
            last lines of its log.
    """
    folder = master_folder(home)
    record = living(folder)
    if record is None:
        record = _start_once(home, folder, timeout, options)
    token = stored_token(folder)
    if token is None:
        raise MasterUnreachable(f"the master at {record['url']} has no token in {folder / 'token'}")
    return str(record["url"]), token


def living(folder: Path) -> dict[str, Any] | None:
    """Return what a home directory's master has recorded of itself, or None if it does not live on this machine."""
    record = running(folder)
    owner = _owner(record)
    if owner is None or not owner.is_here() or owner.is_dead():
        return None
    return record


def has_died(folder: Path) -> bool:
    """Return whether a home directory's master has ended on this machine without removing its record, as by a kill."""
    owner = _owner(running(folder))
    return owner is not None and owner.is_here() and owner.is_dead()


def stop_master(home: Path, timeout: float = STOP_TIMEOUT) -> bool:
    """Stop a home directory's master; trials go on, and the next master finds them.

    Returns:
        Whether there was one.

    Raises:
        MasterUnreachable: If it does not end.
    """
    owner = _owner(living(master_folder(home)))
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
        time.sleep(POLL_INTERVAL)
    return True


def _owner(record: dict[str, Any] | None) -> Owner | None:
    """Return the process of a record: the time of its start tells it from a later one with its number."""
    if record is None:
        return None
    try:
        return Owner("", 0, str(record["host"]), int(record["pid"]), int(record["start_time"]))
    except (LookupError, TypeError, ValueError):
        return None


def _start_once(home: Path, folder: Path, timeout: float, options: Sequence[str]) -> dict[str, Any]:
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise MasterUnreachable(
            f"cannot create {folder} for a master's files: {e.strerror}; set DET_CORE_HOME to a directory you own"
        ) from None
    deadline = monotonic() + timeout
    try:
        with FileLock(folder / "start.lock", timeout=timeout, poll_interval=LOCK_INTERVAL):
            # Another process may have started it while this one waited for the lock.
            return living(folder) or _start(home, folder, deadline, options)
    except Timeout:
        raise MasterUnreachable(f"another process has been starting the master of {home} for {timeout:g} s") from None


def _start(home: Path, folder: Path, deadline: float, options: Sequence[str]) -> dict[str, Any]:
    check_installed(
        "fastapi", "uvicorn", "sqlalchemy", "alembic", "pydantic", "ruamel.yaml", extra="master", purpose="a master"
    )
    log = folder / "master.log"
    with open(log, "ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "det_core.master", "--home", str(home), "--log-file", str(log), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Where this det_core is, which need not be installed.
            cwd=Path(det_core.__file__).parent.parent,
            # Ctrl-C at this terminal is for the command, not for the master.
            start_new_session=True,
        )
    while (record := living(folder)) is None:
        status = process.poll()
        # Looked at once more: it may have begun to listen, and been stopped, since.
        if status is not None and (record := living(folder)) is None:
            raise MasterUnreachable(f"the master of {home} {_describe_failure(log, log_start, status)}")
        if monotonic() > deadline:
            process.terminate()
            raise MasterUnreachable(f"the master of {home} {_describe_failure(log, log_start, None)}")
        time.sleep(POLL_INTERVAL)
    # It outlives this process: without a status, its destructor would warn of a child that still runs.
    process.returncode = 0
    return record


def _describe_failure(log: Path, log_start: int, status: int | None) -> str:
    """Return why a master did not begin to listen: its own reason, if it gave one, else the end of its log."""
    with open(log, "rb") as file:
        file.seek(log_start)
        lines = file.read().decode(errors="replace").splitlines()[-MAX_LOG_LINES:]
    _, is_refusal, reason = "".join(lines[-1:]).partition(_REFUSAL)
    if is_refusal:
        return f"cannot start: {reason}"
    problem = "does not answer"
    if status is not None:
        problem = f"ended at once (exit status {status})"
    return "\n  ".join([f"{problem}; the end of {log}:", *lines])
