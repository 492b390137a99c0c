"""A helper process as the process that started it sees it: told one thing at a time, listened to by a thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from det_core.core._checkpoint._aside._channel import Channel, connected
from det_core.core._checkpoint._aside._errand import Errand, HelperDied, Unavailable
from det_core.core._checkpoint._aside._image import Image

log = logging.getLogger("det_core.checkpoint")
START = 60.0
"""Seconds that a helper may take to begin."""
END = 2.0
"""Seconds that it gets to end by itself."""
LEAVING = 0.2
"""Seconds that it gets once it has hung up."""
_NOT_HEARD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a helper never hears, from its first instruction on: what they are for, the trainer decides."""
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from det_core.core._checkpoint._aside._helper import main; main(*map(int, sys.argv[2:]))"
)


_STARTING = threading.Lock()
# A process that is forked while a helper is being started, a DataLoader's worker say, would keep the pipe open by which
# Popen hears that the helper runs, and Popen would wait for that worker to end. So forks wait for the start.
os.register_at_fork(before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release)


class Gone(Exception):
    """The helper has ended, as was found out just now."""


class HelperProcess:
    """A started helper.

    The thread that listens sleeps but for a moment after each errand, and ends with the process. It is a daemon, so
    that a script which never closes its context can end; :meth:`close` waits for it.

    Raises:
        Unavailable: no process can be started.
    """

    def __init__(self) -> None:
        with _STARTING:
            ours = self._start()
        self._parent = os.getpid()
        self._channel = ours
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._errand: Errand | None = None
        self._begun = self._gone = False
        self._listener = threading.Thread(target=self._listen, name="det_core-saved", daemon=True)
        self._listener.start()

    def _start(self) -> Channel:
        try:
            ours, theirs = connected()
        except OSError as e:
            raise Unavailable(str(e)) from e
        descriptors = [theirs.incoming.fileno(), theirs.outgoing.fileno()]
        arguments = [json.dumps(sys.path), *map(str, descriptors), str(os.getpid())]
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_HEARD)  # which the helper inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *arguments], pass_fds=descriptors,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, ValueError) as e:
            ours.close()
            raise Unavailable(str(e)) from e
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
            theirs.close()
        return ours

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def forked(self) -> bool:
        """Whether this is a process forked from the one that started it."""
        return os.getpid() != self._parent

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended."""
        return self._gone

    def tell(self, image: Image, message: dict[str, Any], errand: Errand) -> None:
        """Have it do something with an image. One errand at a time.

        Raises:
            Gone: it has ended.
        """
        with self._lock:
            if self._gone:
                raise Gone
            assert self._errand is None, "the errand before is not over"
            self._errand = errand
            fd = None if image.number in self._known else image.fd
            self._known.add(image.number)
            self._send({**message, "image": image.number}, fd)

    def say(self, message: dict[str, Any]) -> None:
        """Tell it something that needs no answer.

        Raises:
            Gone: it has ended.
        """
        with self._lock:
            if self._gone:
                raise Gone
            self._send(message)

    def kill(self, errand: Errand) -> None:
        """End the process, if this is what it does."""
        with self._lock:
            if self._errand is errand:
                self._process.kill()

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            self._channel.send(message, fd)
        except OSError as e:
            log.debug("the helper has ended, which the listener is about to hear: %s", e)

    def close(self) -> None:
        """Hang up, and see that it ends; nothing in a forked child, whose process it is not."""
        if self.forked:
            return
        self._channel.hang_up()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.join(END)
        if self._listener.is_alive():
            log.warning("the process %d, which saves in the background, does not end", self.pid)

    # In the thread.

    def _listen(self) -> None:
        problem: Exception | None = None
        try:
            if not select.select([self._channel.incoming], [], [], START)[0]:
                self._process.kill()
            while True:
                answer, _ = self._channel.receive()
                if "ready" in answer:
                    self._begun = True
                elif (errand := self._take()) is not None:
                    errand.answered(answer)
        except EOFError:
            pass
        except Exception as e:  # whoever waits is told
            problem = e
        finally:
            how = self._reap()
            with self._lock:
                self._gone = True
                self._channel.close()
            if (errand := self._take()) is not None:
                errand.failed(problem or self._why(how))

    def _take(self) -> Errand | None:
        with self._lock:
            errand, self._errand = self._errand, None
            return errand

    def _why(self, how: str) -> Exception:
        if not self._begun:
            return Unavailable(f"it {how} before it had begun")
        return HelperDied(f"the process that saves in the background {how}")

    def _reap(self) -> str:
        """See that it has ended; says how."""
        ended = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = self._process.wait(LEAVING)  # its connection is gone, so it is about to be
        if ended is None:
            self._process.kill()
            return "had to be ended"
        return f"was killed by signal {-ended}" if ended < 0 else f"ended with status {ended}"
