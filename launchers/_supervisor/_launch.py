"""Put the parts together: what every launcher's ``main`` calls."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable

from .._wrapper._linux import adopt_orphans
from ._agent import Control, start_agent
from ._notices import Notices
from ._signals import PASSED_ON, Signals
from ._supervisor import Supervisor

_LONGEST_PATH = 100  # of a unix socket: 108 bytes in <sys/un.h>


def launch(agent_name: str, run_agent: Callable[[Control, str], None]) -> int:
    """Run a job and return the exit status.

    Args:
        agent_name: what to call the framework's agent in messages.
        run_agent: runs the framework's agent to its end, in a process of its own. It is given the :class:`Control` to
            report to and the path of the socket that the wrappers connect to.
    """
    _open_standard_streams()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they are caught, so that none is lost
    folder = _private_folder()
    path = os.path.join(folder, "s")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(1024)
    agent = start_agent(agent_name, lambda control: run_agent(control, path), [listener], mask)
    signals, notices = Signals(), Notices()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        adopt_orphans()
        return Supervisor(listener, agent, signals, notices).run()
    finally:
        notices.flush(2)
        for link in (listener, agent.control):
            link.close()
        os.close(agent.capture)
        signals.close()
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    """A folder that only this user can enter (mkdtemp makes it 0700), with room for a socket's name."""
    folder = tempfile.mkdtemp(prefix="det-core-")
    if len(os.fsencode(folder)) > _LONGEST_PATH - 2:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="det-core-", dir="/tmp")
    return folder


def _open_standard_streams() -> None:
    """Open 0, 1 and 2 where the launcher was started without them, so that no socket takes their place."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return
