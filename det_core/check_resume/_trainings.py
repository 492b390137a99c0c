"""Starts of the command that is checked: each in a home and session of its own, stopped or killed by plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from det_core._env import changed_environment
from det_core._standalone.processes import send, start_time
from det_core.check_resume._probe import PLAN, start_folder
from det_core.journal import list_runs

POLL_INTERVAL = 0.05
PROGRESS_INTERVAL = 1.0
LEFT_TIMEOUT = 5.0
"""Seconds in which processes may end after the command: a forkserver notices the end of its parent by itself."""
KILL_TIMEOUT = 10.0
MIN_TIMEOUT = 120.0
TIMES_SLOWER = 10
"""A start is hung when it takes this many times as long as the first training."""
TAIL_BYTES = 4000
OUTPUT = "output.txt"
PROBE = "det_core.check_resume._probe"
RESUMED_PLAN = {"resumed": True, "batches": 1}
"""Plan of a start that resumes what was stopped or killed."""


@dataclass(frozen=True)
class Start:
    """One start of the command, ended.

    Attributes:
        status: its exit status, negative for a signal.
        seconds: how long it ran.
        is_killed: whether the check killed it, as planned.
        is_hung: whether it was killed because it did not end.
        left: commands of processes that were left running.
        output: the end of what it printed.
        notes: what the probe has noted, by rank.
    """

    status: int
    seconds: float
    is_killed: bool = False
    is_hung: bool = False
    left: tuple[str, ...] = ()
    output: str = ""
    notes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def noted(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the notes of an event, in order."""
        return [note for note in self.notes.get(rank, []) if note["event"] == event]


class Home:
    """Home folder of one bare training, in which the command is started once or twice.

    Args:
        path: the folder; made here.
        command: the command.
        on_progress: called now and then with the largest step that has been reported.
    """

    def __init__(self, path: Path, command: Sequence[str], on_progress: Callable[[int], None]) -> None:
        self.path = path
        self._command = list(command)
        self._on_progress = on_progress
        self._starts = 0

    def run(self, plan: dict[str, Any], timeout: float | None = None) -> Start:
        """Start the command and wait for its end; from the second time on its run is resumed.

        Args:
            plan: what the probe is to do, see :class:`det_core.check_resume._probe.Probe`.
            timeout: maximum time in seconds. Defaults to None: without a limit.

        Raises:
            ValueError: If the command is not a program that can be run.
        """
        folder = lay_out(self.path, self._starts, plan)
        runs = list_runs(self.path)
        variables = {
            "DET_CORE_HOME": str(self.path),
            "DET_CORE_RESUME": "latest" if runs else None,  # an ID would hide a name that is another each time
            "DET_CORE_RUN_DIR": None,  # of the trial in which the check itself may run
            "DET_CORE_PROBE": PROBE,
            "DET_CORE_PROBE_DIR": str(folder),
        }
        self._starts += 1
        began = time.monotonic()
        with open(folder / OUTPUT, "wb") as output:
            try:
                process = subprocess.Popen(
                    self._command, env=changed_environment(variables), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C at the check must not save in it
                )  # fmt: skip
            except OSError as e:
                raise ValueError(f"cannot run {self._command[0]}: {e.strerror}") from None
        try:
            killed, hung = self._wait(process, folder, plan, timeout)
            seconds = time.monotonic() - began
            left: Sequence[str] = ()
            if not killed and not hung:  # otherwise they are killed below
                left = _wait_for_left(folder)
        finally:
            _kill_all(process, folder)
        # The cut may fall within a character.
        text = (folder / OUTPUT).read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return Start(process.returncode, seconds, killed, hung, tuple(left), text, read_notes(folder))

    def _wait(
        self, process: subprocess.Popen[bytes], folder: Path, plan: dict[str, Any], timeout: float | None
    ) -> tuple[bool, bool]:
        """Wait for the end, and return whether the moment to kill has come, and whether the time is up."""
        began = shown = time.monotonic()
        while process.poll() is None:
            time.sleep(POLL_INTERVAL)
            now = time.monotonic()
            # The chief waits at this note, so that the kill comes at an exact step.
            if "kill_at" in plan and any(note["event"] == "kill" for note in read_notes(folder).get(0, [])):
                return True, False
            if timeout is not None and now - began > timeout:
                return False, True
            if now - shown >= PROGRESS_INTERVAL:
                shown = now
                self._on_progress(_newest_step(self.path))
        return False, False


def lay_out(home: Path, number: int, plan: dict[str, Any]) -> Path:
    """Make the folder of a start with its plan, and return it."""
    folder = home / start_folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN).write_text(json.dumps(plan))
    return folder


def timeout_after(first: Start) -> float:
    """Return how long any other start may take."""
    return max(MIN_TIMEOUT, TIMES_SLOWER * first.seconds)


def read_notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what the probe of each rank has noted."""
    notes: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = path.read_text().split("\n")[:-1]  # what is not ended was cut by a kill
        notes[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in lines]
    return notes


def _newest_step(home: Path) -> int:
    """Return the step of the last line of metrics of the newest run; -1 before."""
    for run in list_runs(home)[:1]:
        journals = sorted(run.path.glob("journal-*-0.jsonl"))
        for path in reversed(journals):
            with open(path, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
                # Without the first line, which the seek may have cut, and the last, which may be incomplete.
                steps = [_step_in(line) for line in file.read().split(b"\n")[1:-1]]
            if known := [step for step in steps if step is not None]:
                return known[-1]
    return -1


def _step_in(line: bytes) -> int | None:
    record = json.loads(line)
    if record["kind"] != "metrics":
        return None
    step = record.get("steps_completed")
    if not isinstance(step, int):
        return None
    return step


# Processes of a start: those with a variable that they have inherited, and those that the probe has noted.


def processes_of(folder: Path) -> list[int]:
    """Return the processes of a start, by the folder of its probe."""
    mark = f"DET_CORE_PROBE_DIR={folder}".encode()
    # A rank that changes its environment keeps the one in /proc, and a daemon inherits it.
    found = {pid for pid in _all_pids() if mark in _variables_of(pid)}
    for notes in read_notes(folder).values():
        found |= {
            # The start time tells a process from a later one with its number.
            note["pid"]
            for note in notes
            if note["event"] == "start" and note["began"] == start_time(note["pid"])
        }
    # Without dead ones, which keep their number until their parent reaps them.
    return [pid for pid in found if pid != os.getpid() and start_time(pid) is not None]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _variables_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return []


def _wait_for_left(folder: Path) -> list[str]:
    """Wait until no process of a start runs any more; return the commands of those that still do."""
    deadline = time.monotonic() + LEFT_TIMEOUT
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return [_command_of(pid) for pid in left]


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {pid}"
    return " ".join(word.decode(errors="replace") for word in words if word)[:200]


def _kill_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill every process of a start, until none is left, and reap the command."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while (pids := processes_of(folder)) and time.monotonic() < deadline:
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.005)  # looked for again, as one may have started another meanwhile
    process.kill()
    process.wait()
