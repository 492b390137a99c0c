"""Ranks of one node: start, signals, grace period, and the end of everything that the job has started.

Two processes run a job, and each ends everything if the other one is killed::

    launcher         receives the signals and forwards them; its exit status is the job's
      └─ supervisor  leads a session of its own: output, grace period, root cause
           ├─ rank 0     leads a session of its own; the kernel kills it when the supervisor dies
           └─ rank 1 …
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from det_core._standalone.processes import (
    CannotRun,
    adopt_orphans,
    end_descendants,
    reap,
    send,
    set_parent_death_signal,
    set_title,
    spawn,
)
from det_core._standalone.stop_signals import SAME_INTERRUPT, STOP_SIGNALS

from ._links import Link
from ._outcome import RankOutcome, counted, exit_status, lost_peer, shell_status, signal_name, summary
from ._output import PREFIX, Output, write_all

FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2)
"""Signals that the scripts receive."""
# A script may have a meaning of its own for the two user signals.
GRACE_SIGNALS = tuple(signum for signum in FORWARDED_SIGNALS if signum not in (signal.SIGUSR1, signal.SIGUSR2))
"""Signals that start the grace period."""
PEER_LOST_DELAY = 5.0
"""Seconds between the loss of a rank and SIGTERM to the others, in which their scripts may notice it themselves."""
DESCENDANT_GRACE = 1.0
"""Seconds in which other processes of the scripts may end after them; some remove shared memory and files."""
_SUPERVISOR_MARGIN = 10.0
"""Seconds beyond the grace period after which a supervisor counts as stuck."""
_LAST_LINES_TIMEOUT = 0.5
"""Maximum wait for the last lines of a failed rank, which may report that another one was lost before."""
_POLL_INTERVAL = 0.02
_NAME_RUNNING_DELAY = 5.0
"""Seconds between SIGTERM after a failure and the notice that names the ranks which still run."""
_DRAIN_TIMEOUT = 5.0
"""Maximum wait for a reader of the output, or for another node, after the ranks were killed."""
_DAY = 86400.0
_NEVER = math.inf


@dataclass(frozen=True)
class RankSpec:
    """A rank to start."""

    rank: int
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Job:
    """Ranks of this node and the way they are treated."""

    ranks: list[RankSpec]
    grace: float
    """Seconds in which scripts may save and exit after a signal; they are killed then."""
    tail: int
    """Number of last lines of the rank that failed first to show at the end."""
    link: Link | None = None
    """Connection to the launchers of other nodes."""
    notice: str = ""
    """Message for the user before everything else."""
    failure: str = ""
    """Cause for which no rank can start here, if other launchers have to receive it."""
    failure_status: int = 1
    """Exit status of that failure."""
    batch: bool = False
    """Whether ranks get the batch scheduling class: those that wait then yield their processor to others."""
    folder: str = ""
    """Directory that is removed with the job."""
    single_rank: bool = False
    """Whether this is one rank that another program has started. That program reports about it and has a timeout of
    its own, its lines alternate with those of other ranks, and it ends with that program."""


def run(job: Job) -> int:
    """Run a job and return its exit status once all of its processes have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with SIG_IGN, inherited by exec, children cannot be waited for
    # `nohup` and a shell's `&` ignore a signal on purpose.
    handled = {signum for signum in FORWARDED_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    for signum in handled:
        signal.signal(signum, signal.SIG_DFL)  # between fork and exec a rank must not run Python's handlers
    adopt_orphans()  # a script's processes stay below this one, whatever session or group they choose
    launcher_alive, held = os.pipe()
    parent_fds = [launcher_alive]
    if job.single_rank:
        parent_fds.append(_parent_death_fd())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(held)
            os.setsid()  # a Ctrl-C at the terminal reaches the launcher only, and so each script once
            adopt_orphans()
            # `pkill -9 -f train.py` kills the launcher, whose command line names the script. This one survives it and
            # ends the rest.
            set_title(f"supervisor of process {os.getppid()}")
            status = Supervisor(job, parent_fds, handled, mask).run()
        except Exception:
            traceback.print_exc()
        finally:
            end_descendants()
            _remove(job.folder)
            os._exit(status)
    status = _wait(pid, handled, job.grace)
    end_descendants()
    _remove(job.folder)
    if status < 0:
        with contextlib.suppress(OSError):
            write_all(2, f"{PREFIX}the supervisor (pid {pid}) was killed by {signal_name(-status)}\n".encode())
    return shell_status(status)


def _wait(pid: int, handled: set[signal.Signals], grace: float) -> int:
    """Forward signals to the supervisor until it ends; return its status, or minus the signal that killed it."""
    kill_at = _NEVER
    while True:
        timeout = min(max(0.0, kill_at - time.monotonic()), _DAY)
        # SIGCHLD is blocked: the kernel then queues it although its default action is to be ignored.
        info = signal.sigtimedwait({*handled, signal.SIGCHLD}, timeout)
        if info is None:
            if time.monotonic() >= kill_at:
                send(pid, signal.SIGKILL)  # stopped or stuck; its ranks die with it
                kill_at = _NEVER
        elif info.si_signo != signal.SIGCHLD:
            send(pid, info.si_signo)
            if info.si_signo in GRACE_SIGNALS:
                kill_at = min(kill_at, time.monotonic() + grace + _SUPERVISOR_MARGIN)
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _parent_death_fd() -> int:
    """Return a file descriptor that becomes readable when the parent process dies."""
    # PR_SET_PDEATHSIG would fire early if the parent started this process in a thread that ends before it.
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # a kernel before 5.3; or the parent has just died, which the next line notices
        set_parent_death_signal(signal.SIGKILL)
        return os.pipe()[0]


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Parent of the ranks: one loop over signals, children, other nodes and the clock.

    Args:
        job: job to run.
        parent_fds: file descriptors that become readable when a process dies that the job must not outlive.
        handled: signals that are blocked now and handled once all ranks run.
        mask: signals that scripts have blocked.
    """

    def __init__(
        self, job: Job, parent_fds: list[int], handled: set[signal.Signals], mask: set[signal.Signals | int]
    ) -> None:
        self._job = job
        self._parent_fds = parent_fds
        self._handled = handled
        self._mask = mask
        self._output = Output(shared=job.single_rank, interactive=os.isatty(0))
        self._node = 0
        if job.link:
            self._node = job.link.node
        self._ranks = [RankOutcome(spec.rank, node=self._node) for spec in job.ranks]
        self._running: dict[int, RankOutcome] = {}  # by process ID
        self._stop = 0  # the first signal that asked the job to end
        self._interrupts = 0
        self._interrupted_at = -math.inf
        self._failed = False  # a rank has failed, here or on another node
        self._unreported: list[RankOutcome] = []  # failed here, and not sent to other nodes yet
        self._terminate_at = _NEVER
        self._name_running_at = _NEVER
        self._kill_at = _NEVER
        self._give_up_at = _NEVER
        self._poll = select.poll()

    def run(self) -> int:
        """Run the job to its end and return its exit status."""
        self._start()
        self._run_until(lambda: not self._running and not self._unreported)
        end_descendants(DESCENDANT_GRACE)
        others = self._leave_links()  # before the output ends, which prints their news
        self._output.finish()
        self._run_until(lambda: not self._output.is_alive())
        for rank in self._ranks:
            self._read_output(rank)
        ranks = [*self._ranks, *others]
        if not self._output.is_alive():  # otherwise its reader has stopped, and a write would block
            self._write_summary(ranks)
        return exit_status(ranks)

    def _write_summary(self, ranks: list[RankOutcome]) -> None:
        for text, lines in summary(ranks, self._job.tail, self._stop, self._node):
            if not self._job.single_rank or text.endswith("could not be written"):
                with contextlib.suppress(OSError):  # stderr is closed or full; the exit status remains
                    write_all(2, f"{PREFIX}{text}\n".encode(errors="surrogateescape") + lines)

    def _start(self) -> None:
        if self._job.notice:
            self._output.print_notice(self._job.notice)
        for spec, rank in zip(self._job.ranks, self._ranks, strict=True):
            self._spawn(spec, rank)
        # Signals are still blocked, and a thread inherits that: they are delivered to this thread only.
        self._output.start()
        if self._job.link:
            self._job.link.start()
            if self._job.failure:
                self._failed = True
                self._job.link.send_failure(self._node_failure())
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*self._handled, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)  # without a handler Python writes no number to the descriptor
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for fd in (self._signals, self._output.done, *self._parent_fds):
            self._poll.register(fd, select.POLLIN)
        if self._job.link:
            self._poll.register(self._job.link.fd, select.POLLIN)

    def _spawn(self, spec: RankSpec, rank: RankOutcome) -> None:
        stdout = self._output.pipe(spec.rank, 1)
        stderr = self._output.pipe(spec.rank, 2)
        prepare = _use_batch_scheduling if self._job.batch else None
        try:
            rank.pid = spawn(spec.command, spec.environment, stdout, stderr, mask=self._mask, prepare=prepare)
            self._running[rank.pid] = rank
        except CannotRun as e:
            os.write(stderr, f"{e}\n".encode(errors="surrogateescape"))
            self._on_end(rank, e.status)
        os.close(stdout)
        os.close(stderr)

    def _node_failure(self) -> RankOutcome:
        description = f"could not start: {self._job.failure}"
        return RankOutcome(
            None, status=self._job.failure_status, description=description, node=self._node, ended=time.monotonic()
        )

    def _run_until(self, is_over: Callable[[], object], timeout: float = _NEVER, *, gives_up: bool = True) -> None:
        """Handle events until ``is_over()``, for at most ``timeout`` seconds.

        With ``gives_up`` it also returns ``_DRAIN_TIMEOUT`` after the ranks were killed.
        """
        self._reap()
        deadline = time.monotonic() + timeout
        while not is_over():
            now = time.monotonic()
            last = min(deadline, self._give_up_at) if gives_up else deadline
            if now >= last:
                return
            poll_at = now + _POLL_INTERVAL if self._unreported else _NEVER
            due = min(self._terminate_at, self._kill_at, self._name_running_at, poll_at, last, now + _DAY)
            for fd, _ in self._poll.poll(max(0.0, due - now) * 1000 + 1):
                self._on_readable(fd)
            self._run_due(time.monotonic())

    def _on_readable(self, fd: int) -> None:
        if fd in self._parent_fds:
            raise SystemExit(1)
        if fd == self._signals:
            for signum in os.read(fd, 4096):
                if signum == signal.SIGCHLD:
                    self._reap()
                else:
                    self._on_signal(signal.Signals(signum))
        elif fd == self._output.done:
            self._poll.unregister(fd)
            # The thread closes this descriptor by its last statement and is still alive for a moment: a caller that
            # looked at is_alive() alone would wait for an event that is over.
            self._output.join()
            if self._output.failure is not None:
                raise self._output.failure
        elif self._job.link:
            for news in self._job.link.receive():
                self._on_news(news)

    def _reap(self) -> None:
        for pid, status in (reap() or {}).items():
            if rank := self._running.pop(pid, None):
                self._on_end(rank, os.waitstatus_to_exitcode(status))

    def _on_end(self, rank: RankOutcome, status: int) -> None:
        rank.status = status
        rank.ended = time.monotonic()
        if status:
            self._announce(rank)
            self._tear_down(PEER_LOST_DELAY)
            if self._job.link:
                self._unreported.append(rank)

    def _announce(self, rank: RankOutcome) -> None:
        # At once and not in the summary, as the others may use all of their grace period.
        if self._running and not self._failed and not self._stop:
            others = counted(len(self._running), "other rank")
            self._print_notice(f"{rank.name} {rank.failure}; {self._job.grace:g} s for {others} to end")

    def _read_output(self, rank: RankOutcome) -> None:
        rank.tail = self._output.tail(rank.rank)
        rank.lost = self._output.lost(rank.rank)
        if rank.status:
            rank.peer = lost_peer(rank.tail)

    def _on_news(self, news: RankOutcome | str) -> None:
        """Handle a failure on another node, or a notice."""
        if isinstance(news, str):
            return self._print_notice(news)
        if not self._failed and not self._stop:
            self._print_notice(f"{news.name} {news.failure}: the job ends here too")
        delay = PEER_LOST_DELAY
        if news.rank is None:  # scripts notice a dead rank, but not that a whole node is lost
            delay = 0.0
        self._tear_down(delay)

    def _tear_down(self, delay: float) -> None:
        """Schedule the end of all ranks after a failure: SIGTERM after ``delay`` seconds, then the grace period."""
        if not self._failed and not self._stop:
            now = time.monotonic()
            self._terminate_at = now + min(delay, self._job.grace / 2)
            self._kill_at = now + self._job.grace
        self._failed = True

    def _on_signal(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT:
            # A scheduler sends it to all processes, and the launcher forwards its own.
            if now - self._interrupted_at < SAME_INTERRUPT:
                return
            self._interrupted_at = now
            self._interrupts += 1
        # The second Ctrl-C is forwarded, as it may interrupt a script's saving.
        if self._interrupts >= 3 and not self._job.single_rank:
            self._print_notice("third Ctrl-C: killing all ranks that still run")
            self._kill_at = 0.0
            return
        count = sum(send(pid, signum) for pid in self._running)
        forwarded = f"{signum.name} forwarded to {counted(count, 'rank')}"
        if signum in GRACE_SIGNALS and not self._stop:
            self._begin_grace(signum, count, forwarded)
        elif signum in STOP_SIGNALS and signum not in GRACE_SIGNALS:
            self._print_notice(forwarded)

    def _begin_grace(self, signum: signal.Signals, count: int, forwarded: str) -> None:
        self._stop = signum
        self._terminate_at = _NEVER
        if not count:  # only a reader of the output, or another node, is still waited for
            self._kill_at = 0.0
            return self._print_notice(f"{signum.name}: no rank is running, nothing to save")
        self._kill_at = min(self._kill_at, time.monotonic() + self._job.grace)
        if signum in STOP_SIGNALS:
            self._print_notice(f"{forwarded}; grace period {self._job.grace:g} s")
        else:
            self._print_notice(f"{forwarded}; it ends a script at once, unless the script handles it")

    def _run_due(self, now: float) -> None:
        for rank in self._unreported[:]:
            if self._job.link and (self._output.ended(rank.rank) or now - rank.ended >= _LAST_LINES_TIMEOUT):
                self._read_output(rank)
                self._job.link.send_failure(rank)
                self._unreported.remove(rank)
        if now >= self._terminate_at:
            self._terminate_at = _NEVER
            self._name_running_at = now + _NAME_RUNNING_DELAY
            for pid in self._running:
                send(pid, signal.SIGTERM)
        if now >= self._name_running_at:
            self._name_running_at = _NEVER
            self._name_running(now)
        if now >= self._kill_at:
            self._kill_at = _NEVER
            self._give_up_at = now + _DRAIN_TIMEOUT
            self._kill_running()

    def _name_running(self, now: float) -> None:
        if not self._running or self._kill_at - now < 1:
            return
        names = ", ".join(f"rank {rank.rank} (pid {pid})" for pid, rank in self._running.items())
        # A collective in C code runs no Python handler until it returns.
        self._print_notice(
            f"still running {_NAME_RUNNING_DELAY:g} s after SIGTERM: {names}; each may be saving, or wait in a "
            f"collective that no signal interrupts; killing in {self._kill_at - now:.0f} s"
        )

    def _kill_running(self) -> None:
        for pid, rank in self._running.items():
            self._print_notice(f"killing rank {rank.rank} (pid {pid}), which still runs")
            rank.description = "did not end within the grace period and was killed by the launcher"
            if self._interrupts >= 3:
                rank.description = "was killed by the launcher after the third Ctrl-C"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _leave_links(self) -> list[RankOutcome]:
        """Leave the other launchers and return the failures of their ranks.

        They exchange failures through node 0, whose launcher therefore stays until all have connected and left. Another
        one stays until it has connected to node 0 and, if its ranks ended of PeerLost, until it has received the
        failure of the rank that they report, so that all nodes end with the same status and name.
        """
        link = self._job.link
        if link is None:
            return []
        self._run_until(lambda: self._stop or not link.pending, gives_up=False)
        if self._failed and not self._stop:  # those that have connected only now have their grace period from now on
            self._kill_at = time.monotonic() + self._job.grace
            self._give_up_at = _NEVER
        if link.node == 0:
            self._run_until(lambda: self._stop or not link.others)
        else:
            own = {rank.rank for rank in self._ranks}
            lost = {rank.peer for rank in self._ranks if rank.peer is not None} - own
            self._run_until(
                lambda: self._stop or not link.others or all(map(link.knows_failure_of, lost)), PEER_LOST_DELAY
            )
        link.leave()
        return link.failed()

    def _print_notice(self, text: str) -> None:
        if not self._job.single_rank:
            self._output.print_notice(text)


def _use_batch_scheduling() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
