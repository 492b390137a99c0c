"""Runs the ranks of one machine: starts them, passes signals on, and sees that nothing outlives the job.

Two processes do it, and each ends everything if the other one is killed::

    launcher         hears the signals and hands them on; its exit status is the job's
      └─ supervisor  in a session of its own, so that a Ctrl-C at the terminal comes once: output, grace, first failure
           ├─ rank 0     in a session of its own; killed by the kernel when the supervisor dies
           └─ rank 1 …

Both adopt orphans, so that all processes of a script stay below them, whatever session or group they have chosen.
The supervisor has a name of its own: a ``pkill -9 -f train.py`` that ends the launcher leaves one to end the rest.
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
    set_title,
    signal_at_parents_death,
    spawn,
)
from det_core._standalone.stop_signals import SAME_INTERRUPT, STOP_SIGNALS

from ._links import Link
from ._outcome import RankOutcome, exit_status, lost_peer, shell_status, signal_name, summary
from ._output import PREFIX, Output, write_all

FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2)
"""Signals that are the scripts'."""
GRACE_SIGNALS = tuple(signum for signum in FORWARDED_SIGNALS if signum not in (signal.SIGUSR1, signal.SIGUSR2))
"""Signals after which the grace runs. A script may have a meaning of its own for the two others."""
PEER_LOST_DELAY = 5.0
"""Seconds that a script gets to find out by itself that another rank was lost, before it is told by SIGTERM."""
DESCENDANT_GRACE = 1.0
"""Seconds that other processes of the scripts get to end after them; some remove what a script has shared."""
_SUPERVISOR_MARGIN = 10.0
"""Seconds beyond the grace after which a supervisor that has not ended counts as stuck."""
_LAST_LINES = 0.5
"""Seconds for which the last lines of a rank that has failed are waited for, as they may say that another one has."""
_POLL_INTERVAL = 0.02
"""Seconds between two looks for them."""
_UNHEEDED_DELAY = 5.0
"""Seconds after the SIGTERM that follows a failure, after which ranks that still run are named."""
_DRAIN_TIMEOUT = 5.0
"""Seconds after the killing for which a reader of the output, or another machine, is still waited for."""
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
    """What runs on this machine, and how it is treated."""

    ranks: list[RankSpec]
    grace: float
    """Seconds that scripts get to save and exit after a signal; what still runs then is killed."""
    tail: int
    """How many of the last lines of the first rank that failed are shown at the end."""
    link: Link | None = None
    """To the launchers of other machines."""
    notice: str = ""
    """What is said first."""
    failure: str = ""
    """Why no rank can be started here, where the launchers of other machines have to hear of it."""
    failure_status: int = 1
    """The exit status of that."""
    batch: bool = False
    """Whether ranks get the batch scheduling class: a rank that waits does not take the processor from one that
    computes."""
    folder: str = ""
    """A folder that is removed with the job."""
    single_rank: bool = False
    """Whether this is one rank that another program has started. That program speaks of it and has a time set, its
    lines take turns with those of other ranks, and it ends with that program."""


def run(job: Job) -> int:
    """Run a job and return its exit status once nothing of it runs any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored no child can be waited for
    handled = {
        signum for signum in FORWARDED_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN
    }  # nohup, a shell's `&`
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    for signum in handled:
        signal.signal(signum, signal.SIG_DFL)  # between fork and exec a rank must not run Python's handlers
    adopt_orphans()
    launcher_lives, held = os.pipe()
    parent_fds = [launcher_lives, *([_parents_death()] if job.single_rank else [])]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(held)
            os.setsid()
            adopt_orphans()
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
    """Hand signals on to the supervisor until it ends; its status, or minus the signal that killed it.

    A supervisor that was stopped, or hangs, cannot end the job: it is killed, and the ranks with it. (A blocked SIGCHLD
    is queued, though nothing would happen by default, so that it can be waited for.)
    """
    kill_at = _NEVER
    while True:
        left = min(max(0.0, kill_at - time.monotonic()), _DAY)
        info = signal.sigtimedwait({*handled, signal.SIGCHLD}, left)
        if info is None:
            if time.monotonic() >= kill_at:
                send(pid, signal.SIGKILL)
                kill_at = _NEVER
        elif info.si_signo != signal.SIGCHLD:
            send(pid, info.si_signo)
            if info.si_signo in GRACE_SIGNALS:
                kill_at = min(kill_at, time.monotonic() + grace + _SUPERVISOR_MARGIN)
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _parents_death() -> int:
    """A file descriptor that is readable once the parent has died.

    PR_SET_PDEATHSIG would come too early where the parent has started this process in a thread that ends before it.
    """
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # a kernel before 5.3; or it has died just now, which shows as that of an orphan
        signal_at_parents_death(signal.SIGKILL)
        return os.pipe()[0]


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """The parent of the ranks: one loop over signals, children, other machines and the clock.

    Args:
        job: what to run.
        parent_fds: file descriptors that are readable once a process has died that the job must not outlive.
        handled: signals that are blocked now, and are handled once all ranks run.
        mask: the signals that scripts have blocked.
    """

    def __init__(
        self, job: Job, parent_fds: list[int], handled: set[signal.Signals], mask: set[signal.Signals | int]
    ) -> None:
        self._job, self._parent_fds, self._handled, self._mask = job, parent_fds, handled, mask
        self._output = Output(shared=job.single_rank, interactive=os.isatty(0))
        self._node = job.link.node if job.link else 0
        self._ranks = [RankOutcome(start.rank, node=self._node) for start in job.ranks]
        self._running: dict[int, RankOutcome] = {}  # by process id
        self._stop = 0  # the first signal that asked the job to end
        self._interrupts = 0
        self._interrupted_at = -math.inf
        self._failed = False  # a rank has failed, here or elsewhere
        self._unreported: list[
            RankOutcome
        ] = []  # those that have failed here and of which other machines do not know yet
        self._terminate_at = self._kill_at = self._give_up_at = self._name_at = _NEVER
        self._poll = select.poll()

    def run(self) -> int:
        """Run the job to its end; its exit status."""
        self._start()
        self._until(lambda: not self._running and not self._unreported)
        end_descendants(DESCENDANT_GRACE)
        others = self._leave_links()  # before the output ends, by which their news are told
        self._output.finish()
        self._until(lambda: not self._output.is_alive())
        for rank in self._ranks:
            self._look_at_output(rank)
        ranks = [*self._ranks, *others]
        if not self._output.is_alive():  # else nobody reads, and a write would block
            for text, lines in summary(ranks, self._job.tail, self._stop, self._node):
                if not self._job.single_rank or text.endswith("could not be written"):
                    with contextlib.suppress(OSError):  # nobody is there to tell, but for the status
                        write_all(2, f"{PREFIX}{text}\n".encode(errors="surrogateescape") + lines)
        return exit_status(ranks)

    def _start(self) -> None:
        if self._job.notice:
            self._output.say(self._job.notice)
        for start, rank in zip(self._job.ranks, self._ranks, strict=True):
            out, err = self._output.pipe(start.rank, 1), self._output.pipe(start.rank, 2)
            try:
                prepare = _take_the_batch_class if self._job.batch else None
                rank.pid = spawn(start.command, start.environment, out, err, mask=self._mask, prepare=prepare)
                self._running[rank.pid] = rank
            except CannotRun as e:
                os.write(err, f"{e}\n".encode(errors="surrogateescape"))
                self._ended(rank, e.status)
            os.close(out)
            os.close(err)
        # Threads are started while signals are blocked, so that it is this one that gets them.
        self._output.start()
        if self._job.link:
            self._job.link.start()
            if self._job.failure:
                words = f"could not start: {self._job.failure}"
                self._failed = True
                self._job.link.send_failure(
                    RankOutcome(
                        None,
                        status=self._job.failure_status,
                        description=words,
                        node=self._node,
                        ended=time.monotonic(),
                    )
                )
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*self._handled, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)  # its number comes by the descriptor
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        links = [self._job.link.fd] if self._job.link else []
        for fd in (self._signals, self._output.done, *self._parent_fds, *links):
            self._poll.register(fd, select.POLLIN)

    def _until(self, over: Callable[[], object], seconds: float = _NEVER, *, gives_up: bool = True) -> None:
        """Hear and act until ``over()``, for ``seconds`` at most.

        Unless ``gives_up`` is False, it ends as well once nothing more is worth waiting for.
        """
        self._reap()
        end_at = time.monotonic() + seconds
        while not over():
            now = time.monotonic()
            last = min(end_at, self._give_up_at) if gives_up else end_at
            if now >= last:
                return
            look_at = now + _POLL_INTERVAL if self._unreported else _NEVER
            due = min(self._terminate_at, self._kill_at, self._name_at, look_at, last, now + _DAY)
            for fd, _ in self._poll.poll(max(0.0, due - now) * 1000 + 1):
                self._on_readable(fd)
            self._run_due(time.monotonic())

    def _on_readable(self, fd: int) -> None:
        if fd in self._parent_fds:
            raise SystemExit(1)
        if fd == self._signals:
            for signum in os.read(fd, 4096):
                self._reap() if signum == signal.SIGCHLD else self._signalled(signal.Signals(signum))
        elif fd == self._output.done:
            self._poll.unregister(fd)
            # By its last line, which closes this descriptor, the thread still counts as alive: one that looked only
            # at is_alive() would wait for an event that has been.
            self._output.join()
            if self._output.failure is not None:
                raise self._output.failure
        elif self._job.link:
            for news in self._job.link.receive():
                self._on_news(news)

    def _reap(self) -> None:
        for pid, status in (reap() or {}).items():
            if rank := self._running.pop(pid, None):
                self._ended(rank, os.waitstatus_to_exitcode(status))

    def _ended(self, rank: RankOutcome, status: int) -> None:
        rank.status, rank.ended = status, time.monotonic()
        if status:
            self._announce(rank)
            self._tear_down(PEER_LOST_DELAY)
            if self._job.link:
                self._unreported.append(rank)

    def _announce(self, rank: RankOutcome) -> None:
        """Say at once that a rank failed, as the others may take all of their time to end."""
        if self._running and not self._failed and not self._stop:
            others = "the other rank has" if len(self._running) == 1 else "the other ranks have"
            self._say(f"{rank.name} {rank.failure}: {others} {self._job.grace:g} s to end")

    def _look_at_output(self, rank: RankOutcome) -> None:
        rank.tail, rank.lost = self._output.tail(rank.rank), self._output.lost(rank.rank)
        rank.peer = lost_peer(rank.tail) if rank.status else None

    def _on_news(self, news: RankOutcome | str) -> None:
        """News of other machines."""
        if isinstance(news, str):
            return self._say(news)
        if not self._failed and not self._stop:
            self._say(f"{news.name} {news.failure}: the job ends here too")
        self._tear_down(PEER_LOST_DELAY if news.rank is not None else 0.0)

    def _tear_down(self, patience: float) -> None:
        """A rank has failed: the others are to end."""
        if not self._failed and not self._stop:
            now = time.monotonic()
            self._terminate_at, self._kill_at = now + min(patience, self._job.grace / 2), now + self._job.grace
        self._failed = True

    def _signalled(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if signum == signal.SIGINT:
            if now - self._interrupted_at < SAME_INTERRUPT:  # a scheduler's, to the launcher and to this process
                return
            self._interrupted_at = now
            self._interrupts += 1
        if (
            self._interrupts >= 3 and not self._job.single_rank
        ):  # the second is the scripts': they may interrupt their saving
            self._say("Ctrl-C for the third time: killing what still runs")
            self._kill_at = 0.0
            return
        told = sum(send(pid, signum) for pid in self._running)
        passed_on = f"{signum.name}: passed on to {told} rank{'' if told == 1 else 's'}"
        if signum in GRACE_SIGNALS and not self._stop:
            self._stop, self._terminate_at = signum, _NEVER
            if not told:
                self._kill_at = 0.0  # what is still waited for is a reader of the output, or another machine
                return self._say(f"{signum.name}: no rank runs, so there is nothing to save")
            self._kill_at = min(self._kill_at, time.monotonic() + self._job.grace)
            if signum in STOP_SIGNALS:
                has = "has" if told == 1 else "have"
                self._say(f"{passed_on}, which {has} {self._job.grace:g} s to save and exit")
            else:
                self._say(f"{passed_on}; it ends a script at once, unless that handles it")
        elif signum in STOP_SIGNALS and signum not in GRACE_SIGNALS:
            self._say(passed_on)

    def _run_due(self, now: float) -> None:
        """Do what is due."""
        for rank in self._unreported[:]:
            if self._job.link and (self._output.ended(rank.rank) or now - rank.ended >= _LAST_LINES):
                self._look_at_output(rank)
                self._job.link.send_failure(rank)
                self._unreported.remove(rank)
        if now >= self._terminate_at:
            self._terminate_at, self._name_at = _NEVER, now + _UNHEEDED_DELAY
            for pid in self._running:
                send(pid, signal.SIGTERM)
        if now >= self._name_at:
            self._name_at = _NEVER
            if self._running and self._kill_at - now >= 1:
                names = ", ".join(f"rank {rank.rank} (pid {pid})" for pid, rank in self._running.items())
                self._say(
                    f"{_UNHEEDED_DELAY:g} s after SIGTERM, still running: {names}; a rank may be saving, or wait in a "
                    f"collective, where it hears no signal; killed in {self._kill_at - now:.0f} s"
                )
        if now >= self._kill_at:
            self._kill_at, self._give_up_at = _NEVER, now + _DRAIN_TIMEOUT
            for pid, rank in self._running.items():
                self._say(f"rank {rank.rank} (pid {pid}) still runs: killing it")
                if self._interrupts >= 3:
                    rank.description = "was killed by the launcher after the third Ctrl-C"
                else:
                    rank.description = "did not end within the grace and was killed by the launcher"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _leave_links(self) -> list[RankOutcome]:
        """Leave the other machines; their failures.

        They hear of each other by machine 0, whose launcher therefore stays until all have come and left. Another one
        stays until it has linked with machine 0, and, if its ranks ended of PeerLost, until the rank that they name, or
        that one's machine, is known to have failed, so that it gives the same status and name.
        """
        link = self._job.link
        if link is None:
            return []
        self._until(lambda: self._stop or not link.pending, gives_up=False)
        if self._failed and not self._stop:  # those that have linked only now have their grace from now on
            self._kill_at, self._give_up_at = time.monotonic() + self._job.grace, _NEVER
        if link.node == 0:
            self._until(lambda: self._stop or not link.others)
        else:
            here = {rank.rank for rank in self._ranks}
            named = {rank.peer for rank in self._ranks if rank.peer is not None} - here

            def handled() -> bool:
                return not link.others or all(map(link.knows_failure_of, named))

            self._until(lambda: self._stop or handled(), PEER_LOST_DELAY)
        link.leave()
        return link.failed()

    def _say(self, text: str) -> None:
        if not self._job.single_rank:
            self._output.say(text)


def _take_the_batch_class() -> None:
    with contextlib.suppress(OSError):  # not allowed here
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
