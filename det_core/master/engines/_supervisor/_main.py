"""The supervisor's beginning, and the guardian."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback

from . import CONTROL, LOCK
from ._end import EXIT, write_end, write_processes
from ._linux import adopt_orphans
from ._log import Flight, Log
from ._tree import end_all
from ._worker import Pipes, Worker

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(folder: str, appear: str) -> None:
    """Run the allocation of ``folder``."""
    for fd in (LOCK, CONTROL):
        os.set_inheritable(fd, False)
    for signum in _IGNORED:  # whoever ends the machine ends the script, too, and that is to be written down
        signal.signal(signum, signal.SIG_IGN)
    os.chdir(folder)
    adopt_orphans()
    pipes, flight, guardian = Pipes(), Flight(), os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            adopt_orphans()
            write_processes(folder, guardian=guardian, worker=os.getpid())
            Worker(folder, CONTROL, pipes, flight, guardian, visible=appear == "appear").run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    pipes.close()
    os.waitpid(worker, 0)
    if not os.path.exists(os.path.join(folder, EXIT)):
        _take_over(folder, pipes, flight)


def _take_over(folder: str, pipes: Pipes, flight: Flight) -> None:
    """The worker was killed: end what it watched, save what is in the pipes, write down the end."""
    end_all()
    log = Log(os.path.join(folder, "log.jsonl"))
    log.mend(flight.left())
    poll = select.poll()
    for fd in pipes.read:
        poll.register(fd, select.POLLIN)
    streams = {fd: stream for stream, fd in enumerate(pipes.read)}
    while streams and (came := poll.poll(300)):
        for fd, _ in came:
            line = flight.read(fd, streams[fd])
            if line:
                log.add(line)
            else:
                poll.unregister(fd)
                del streams[fd]
    log.close()
    facts = {"status": None, "signal": None, "started": True, "killed": False, "lost": True}
    write_end(folder, {**facts, "error": "its supervisor was killed", "lost_bytes": log.lost, "time": time.time()})
