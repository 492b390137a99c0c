"""The framework's agent as a child of the launcher: forked, in a session of its own, its stderr kept for later.

Forked rather than started anew, because it then shares what the launcher has imported and costs no second start of an
interpreter. It never returns into the launcher's code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from det_core.errors import DetCoreError

from .._words._options import CannotStart, Options, UsageError
from .._wrapper._linux import signal_at_parents_death
from .._wrapper._protocol import MAX_MESSAGE, pack


@dataclass
class Agent:
    """The launcher's side of a started agent."""

    name: str
    """What to call it, as the start of a sentence."""
    pid: int
    control: socket.socket
    """Where :class:`Control` is heard; messages as in ``_wrapper/_protocol``."""
    capture: int
    """A file in memory with what the agent wrote to stderr."""
    status: int | None = None
    """Exit status, or minus the signal; None while it runs."""
    is_program: bool = False
    """Whether it has become the framework's own launcher: see :meth:`Control.become`."""
    has_others: bool = False
    """Whether it has started ranks that the launcher does not hear of."""

    def last_words(self, lines: int) -> bytes:
        """The last lines the agent wrote to stderr."""
        size = os.fstat(self.capture).st_size
        text = os.pread(self.capture, 65536, max(0, size - 65536))
        return b"".join(line + b"\n" for line in text.splitlines()[-lines:])


class Control:
    """The agent's side: what it tells the launcher."""

    def __init__(self, link: socket.socket, stderr: int, capture: int) -> None:
        self._link, self._stderr = link, stderr
        self._capture = os.fstat(capture).st_ino

    def plan(self, expected: int, options: Options) -> None:
        """Say how many ranks will start on this machine; with ``verbose``, speak on stderr from now on."""
        if options.verbose:
            self.speak()
        self._send("plan", expected, options.grace, options.tail)

    def become(self, command: list[str], *, ours: bool = False, others: bool = False) -> NoReturn:
        """Go on as the framework's own launcher: a program that knows nothing of us.

        Called after :meth:`plan`, with this process's environment as that program's. From then on the wrappers write
        to the launcher's stdout and stderr, not to those that the program gives them; a rank that has failed tells the
        program so only when the launcher has ended the other ranks; and what the program says is shown if no rank
        comes of it, or with ``--verbose``.

        Args:
            command: its command line.
            ours: it is a wrapper, which sees the launcher's death itself, and has to end others before its own.
            others: it also starts ranks whose wrappers do not reach the launcher. Then what it says is shown, as their
                output is in it; it is told when the job is to end, at once; and its own exit status counts.

        Raises:
            CannotStart: there is no such program.
        """
        if others:
            self.speak()
        if os.fstat(2).st_ino == self._capture:
            os.dup2(2, 1)
        self._send("becomes", int(others))
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        if ours:
            signal_at_parents_death(0)
        try:
            os.execvp(command[0], command)
        except OSError as e:
            raise CannotStart(f"cannot run {command[0]}: {e.strerror}") from e

    def speak(self) -> None:
        """Write to the launcher's stderr from now on, and what was written so far."""
        if os.fstat(2).st_ino != self._capture:
            return
        sys.stderr.flush()
        said = os.pread(2, os.fstat(2).st_size, 0)
        os.dup2(self._stderr, 2)
        os.write(2, said)

    def notice(self, text: str) -> None:
        """Have the launcher say ``text``."""
        self._send("notice", payload=text.encode(errors="surrogateescape"))

    def quit(self, status: int, text: str = "") -> None:
        """Nothing is going to start: say why, and which exit status that is."""
        self._send("quit", status, payload=text.encode(errors="surrogateescape"))

    def done(self) -> None:
        """Every rank has ended, well or not: the agent did its work."""
        self._send("done")

    def failed(self, error: BaseException) -> None:
        """The agent could not do its work."""
        lines = traceback.format_exception_only(type(error), error)
        self._send("failed", payload="".join(lines)[-4000:].strip().encode(errors="replace"))

    def _send(self, kind: str, *words: object, payload: bytes = b"") -> None:
        self._link.send(pack(kind, *words, payload=payload[: MAX_MESSAGE // 2]))


def start_agent(
    name: str, main: Callable[[Control], None], not_for_it: list[socket.socket], mask: Iterable[int]
) -> Agent:
    """Fork a process that runs ``main``; the sockets ``not_for_it`` are closed there, and ``mask`` is blocked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    capture = os.memfd_create("agent-stderr")
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal_at_parents_death(signal.SIGKILL)
            if os.getppid() == launcher:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                for other in (ours, *not_for_it):
                    other.close()
                _run(main, theirs, capture)
        finally:
            os._exit(1)
    theirs.close()
    return Agent(name, pid, ours, capture)


def _run(main: Callable[[Control], None], link: socket.socket, capture: int) -> NoReturn:
    status = 1
    try:
        control = Control(link, os.dup(2), capture)
        os.dup2(capture, 2)
        status = _guarded(main, control)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _guarded(main: Callable[[Control], None], control: Control) -> int:
    try:
        main(control)
    except UsageError as e:
        control.quit(2, str(e))
        return 2
    except (CannotStart, DetCoreError) as e:
        control.quit(1, str(e))
        return 1
    except BaseException as e:  # also what the framework raises for a signal: it all goes to the launcher
        traceback.print_exc()
        control.failed(e)
        return 1
    return 0
