"""The launcher's loop: it hears the agent, the wrappers, signals and the clock, and decides when all is over."""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from .._words._options import GRACE, TAIL
from .._wrapper._protocol import MAX_MESSAGE, pack, same_user, unpack
from ._agent import Agent
from ._links import Link, send
from ._notices import Notices
from ._processes import end_session, kill, kill_group
from ._ranks import Outcome, Rank, exit_status, summary
from ._signals import ENDING, PASSED_ON, Signals, name

TEARDOWN = 25.0
"""Seconds at most that wrappers take to end the other ranks after a failure: torchrun's agent kills them after 30."""
AGENT_GRACE = 10.0
"""Seconds that the agent gets to leave after all its ranks have, when the job was told to end."""
LATE = 60.0
"""Seconds that the last words of ranks on other machines may take, once the agent has seen all ranks end well."""


class Supervisor:
    """Runs one job to its end.

    Args:
        listener: where wrappers connect.
        agent: the framework's, started.
        signals: installed.
        notices: where the launcher speaks.
    """

    def __init__(self, listener: socket.socket, agent: Agent, signals: Signals, notices: Notices) -> None:
        self._listener, self._agent, self._signals, self._notices = listener, agent, signals, notices
        self._links: dict[int, Link] = {}
        self._ranks: list[Rank] = []
        self._outcome = Outcome()
        self._grace, self._tail = GRACE, TAIL
        self._quit: int | None = None
        self._agent_done = False
        self._early: list[int] = []  # signals that came before every rank was there to hear them
        self._interrupts = 0
        self._torn_down: set[int] = set()  # the links of ranks that were told to end because another one has failed
        self._late_at = self._kill_at = self._force_at = self._agent_at = self._give_up_at = float("inf")
        self._poll = select.poll()
        for fd in (listener.fileno(), agent.control.fileno(), signals.fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> int:
        """Return the job's exit status once nothing of it runs any more."""
        self._reap()  # an agent that ended before SIGCHLD was listened to
        while not (self._agent.status is not None and not self._links) and time.monotonic() < self._give_up_at:
            ready = [fd for fd, _ in self._poll.poll(self._wait())]
            self._hear(ready)
            if self._agent.is_program:
                self._conduct()
            self._act(time.monotonic())
        if self._agent.is_program:
            end_session(self._agent.pid)
        if self._quit is not None:
            return self._quit
        for text, lines in summary(self._ranks, self._outcome, self._tail):
            self._notices.say(text)
            self._notices.show(lines)
        return exit_status(self._ranks, self._outcome)

    def _wait(self) -> float | None:
        """Milliseconds until something is due."""
        due = min(self._late_at, self._kill_at, self._force_at, self._agent_at, self._give_up_at)
        if self._notices.waiting:
            due = min(due, time.monotonic() + 0.1)
        return None if due == float("inf") else max(0.0, due - time.monotonic()) * 1000 + 1

    def _hear(self, ready: list[int]) -> None:
        """What wrappers said comes before their deaths, and those before the reaping that frees process ids."""
        if self._agent.control.fileno() in ready:
            self._hear_agent()
        for fd in ready:
            if link := self._links.get(fd):
                self._wrapper_says(link, link.receive())
        if self._listener.fileno() in ready:
            self._accept()
        if self._signals.fd in ready:
            for signum in self._signals.read():
                if signum == signal.SIGCHLD:
                    self._reap()
                elif signum in PASSED_ON:
                    self._signalled(signum)

    # the agent

    def _hear_agent(self) -> None:
        """All it has said: a wrapper comes after what the agent said before it started that one."""
        while True:
            try:
                message = self._agent.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not message:
                self._poll.unregister(self._agent.control.fileno())
                return
            self._agent_says(message)

    def _agent_says(self, message: bytes) -> None:
        kind, words, payload = unpack(message)
        text = payload.decode(errors="replace")
        if kind == "plan":
            self._outcome.expected, self._grace, self._tail = int(words[0]), float(words[1]), int(words[2])
        elif kind == "becomes":
            self._agent.is_program, self._agent.has_others = True, words[0] == "1"
        elif kind == "notice":
            self._notices.say(text)
        elif kind == "quit":
            self._quit = int(words[0])
            why, _, commands = text.partition("\n")
            self._notices.say(why)
            self._notices.show(commands.encode())  # to be copied, so without our prefix
        elif kind == "done":
            self._agent_done = True
        elif kind == "failed":
            reason = text.splitlines()[-1] if text else "no reason given"
            self._agent_failed(f"{self._agent.name} failed: {reason} (--verbose shows all it says)")

    def _agent_failed(self, error: str) -> None:
        if not self._outcome.agent_error and not self._outcome.stop:
            self._outcome.agent_error, self._outcome.agent_failed_at = error, time.monotonic()

    def _agent_ended(self, status: int) -> None:
        while not self._agent_done and (message := self._agent.control.recv(MAX_MESSAGE)):
            self._agent_says(message)
        self._agent.status = status
        if self._quit is not None or self._agent_done:
            return
        self._hear_the_rest()
        program, running = self._agent.is_program, self._running()
        of_others = self._agent.has_others and status != 0 and not self._failed()
        if program and not of_others and (self._failed() or self._all_ended()):
            return  # it only says in its own way what the wrappers have told
        if program and status == 0 and running and all(link.rank and link.rank.host for link in running):
            # What they have printed is on its way, and their ends come after it.
            self._late_at = time.monotonic() + LATE
            return
        self._agent_left(status, of_others)

    def _agent_left(self, status: int, of_others: bool) -> None:
        """It has ended, and that was too early."""
        how = f"was killed by {name(-status)}" if status < 0 else f"ended with status {status}"
        if not self._outcome.stop and not self._outcome.agent_error:
            self._notices.show(self._agent.last_words(self._tail))
        self._agent_failed(f"{self._agent.name} (pid {self._agent.pid}) {how}")
        if of_others:
            self._outcome.agent_failed_at = 0.0  # though all ranks that are known have ended well before
        if self._running() and self._kill_at == float("inf"):
            self._notices.say(f"{self._outcome.agent_error}: telling its ranks to end, with {self._grace:g} s to do so")
            self._tell(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace

    # the wrappers

    def _hear_the_rest(self) -> None:
        """All that wrappers have said so far, also those that have ended with the agent."""
        while ready := [fd for fd, _ in self._poll.poll(0) if fd in self._links]:
            for fd in ready:
                if link := self._links.get(fd):
                    self._wrapper_says(link, link.receive())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if same_user(connection):
            link = Link(connection)
            self._links[connection.fileno()] = link
            self._poll.register(connection.fileno(), select.POLLIN)
        else:
            connection.close()

    def _wrapper_says(self, link: Link, message: bytes) -> None:
        if not message:
            self._gone(link)
            return
        try:
            self._told(link, *unpack(message))
        except (ValueError, IndexError):  # no wrapper of ours speaks like that
            self._gone(link)

    def _told(self, link: Link, kind: str, words: list[str], payload: bytes) -> None:
        if kind == "hello":
            number, wrapper, attempt = map(int, words[:3])
            self._hello(link, Rank(number, wrapper, attempt, host="".join(words[3:])))
        elif link.rank is not None and kind == "started":
            link.rank.script = int(words[0])
        elif link.rank is not None and kind == "exit":
            link.rank.status, link.rank.ended = int(words[0]), float(words[1])
        elif link.rank is not None and kind == "end":
            link.rank.lost, link.rank.tail = int(words[0]), payload

    def _hello(self, link: Link, rank: Rank) -> None:
        if self._agent.status is not None:
            self._forget(link)  # its agent is dead: nothing is to start any more
            return
        all_there = len(self._ranks) >= self._outcome.expected
        if self._ranks and (rank.attempt > self._ranks[0].attempt or (all_there and not self._connected())):
            self._ranks = []  # the agent has started all ranks anew
        self._ranks.append(rank)
        link.rank = rank
        program = self._agent.is_program
        capture = 0 if program else os.fstat(self._agent.capture).st_ino
        teardown = self._grace if program else min(self._grace, TEARDOWN)
        send(link, pack("start", capture, self._tail, teardown, int(program)), streams=(1, self._notices.fd))
        for signum in self._early:
            send(link, pack("signal", signum, int(signum in ENDING)))
        if self._outcome.stop and self._outcome.stop not in self._early:
            send(link, pack("signal", self._outcome.stop, 1))
        if len(self._ranks) >= self._outcome.expected:
            self._early = []

    def _gone(self, link: Link) -> None:
        rank = link.rank
        self._forget(link)
        if rank is not None and rank.status is None:
            rank.wrapper_died, rank.ended = True, time.monotonic()
            kill_group(0 if rank.host else rank.script)
        if self._outcome.stop and not self._connected() and not self._agent.has_others:
            self._agent_at = max(time.monotonic() + AGENT_GRACE, min(self._kill_at, time.monotonic() + self._grace))

    def _forget(self, link: Link) -> None:
        fd = link.socket.fileno()
        self._poll.unregister(fd)
        self._torn_down.discard(fd)
        del self._links[fd]
        link.socket.close()

    def _connected(self) -> list[Rank]:
        return [link.rank for link in self._links.values() if link.rank is not None]

    def _running(self) -> list[Link]:
        return [link for link in self._links.values() if link.rank and link.rank.status is None]

    def _failed(self) -> bool:
        return any(rank.status or rank.wrapper_died for rank in self._ranks)

    def _all_ended(self) -> bool:
        return len(self._ranks) >= max(1, self._outcome.expected) and not self._running()

    def _tell(self, signum: int) -> int:
        """Have every script that runs get ``signum``, and say how many there are."""
        message = pack("signal", signum, int(signum in ENDING))
        return sum(send(link, message) for link in self._running())

    def _conduct(self) -> None:
        """What torchrun's agent does by itself, for one that would kill the other ranks when one has failed.

        A wrapper whose script has failed waits with its own end until here the others have come to theirs.
        """
        running = self._running()
        if running and self._failed() and not self._outcome.stop:
            for link in running:
                if link.socket.fileno() not in self._torn_down:
                    self._torn_down.add(link.socket.fileno())
                    send(link, pack("teardown"))
        elif not running and self._links and (self._failed() or self._all_ended() or self._agent.status is not None):
            for link in self._links.values():
                if link.rank is not None:
                    send(link, pack("leave"))
        elif not self._links and self._all_ended() and self._agent_at == self._force_at == float("inf"):
            if not self._agent.has_others:
                self._agent_at = time.monotonic() + AGENT_GRACE
            elif self._failed():  # it is ending the others, and a signal would have it leave them
                self._agent_at = time.monotonic() + self._grace + 2 * AGENT_GRACE

    # signals and the clock

    def _signalled(self, signum: int) -> None:
        if len(self._ranks) < max(1, self._outcome.expected):
            self._early.append(signum)
        self._interrupts += signum == signal.SIGINT
        if self._interrupts >= 3:
            self._notices.say("Ctrl-C for the third time: killing what still runs")
            self._kill_at = time.monotonic()
            return
        told = self._tell(signum)
        if signum in ENDING:
            self._stop(signum, told)

    def _stop(self, signum: int, told: int) -> None:
        """The job is to end; ``told`` scripts know it now."""
        first = not self._outcome.stop
        if first:
            self._outcome.stop = signum
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace)
            if self._agent.has_others and self._agent.status is None:
                kill(self._agent.pid, signal.SIGTERM)  # which it passes on to them; a second would have it leave them
                self._agent_at = time.monotonic() + self._grace + 2 * AGENT_GRACE
        if not self._connected() and not self._agent.has_others:
            self._agent_at = time.monotonic()
            self._notices.say(f"{name(signum)}: no rank runs, so there is nothing to save")
        elif first:
            ranks = "1 rank, which has" if told == 1 else f"{told} ranks, which have"
            self._notices.say(f"{name(signum)}: passed on to {ranks} {self._grace:g} s to save and exit")

    def _act(self, now: float) -> None:
        if self._notices.waiting:
            self._notices.flush(0)
        if now >= self._late_at:
            self._late_at = float("inf")
            if self._running():
                self._agent_left(0, of_others=False)
        if now >= self._kill_at:
            self._kill_at, self._force_at = float("inf"), now + 5
            self._kill()
        if now >= self._agent_at:
            self._agent_at, self._force_at = float("inf"), min(self._force_at, now + 3)
            kill(self._agent.pid if self._agent.status is None else 0, signal.SIGTERM)
        if now >= self._force_at:
            self._force_at, self._give_up_at = float("inf"), now + 5
            self._force()

    def _kill(self) -> None:
        for rank in self._connected():
            if rank.status is None:
                self._notices.say(f"rank {rank.rank} (pid {rank.script}) still runs: killing it")
                rank.overdue = True
        for link in self._links.values():
            send(link, pack("kill"))

    def _force(self) -> None:
        """Kill without the help of wrappers, some of which do not answer."""
        for link in [link for link in self._links.values() if link.rank is not None]:
            assert link.rank is not None
            if link.rank.host:
                self._gone(link)  # by which it ends there
                continue
            kill(link.rank.wrapper, signal.SIGKILL)
            if link.rank.status is None:  # after that its process id may be another's
                kill_group(link.rank.script)
        if self._agent.status is None:
            kill(self._agent.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._agent.pid:
                self._agent_ended(os.waitstatus_to_exitcode(status))
