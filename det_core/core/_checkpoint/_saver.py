"""This process's side of the helper: started at the first save, asked, waited for, replaced when it dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from det_core import _clock
from det_core._errors import CheckpointError, StorageError
from det_core.core._checkpoint._background import Job
from det_core.core._checkpoint._channel import Channel
from det_core.core._checkpoint._image import Image

log = logging.getLogger("det_core.checkpoint")
LOOK = 0.2
"""Seconds between two looks whether the work is to be stopped, or somebody waits for it."""
START = 60.0
"""Seconds that a helper may take to begin."""
END = 2.0
"""Seconds that it gets to end by itself."""
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from det_core.core._checkpoint._helper import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Unavailable(Exception):
    """There can be no helper here."""


class HelperDied(CheckpointError):
    """The helper ended in the middle of its work."""


class Saver:
    """A helper process, started when it is first asked, and again after it died. For one thread at a time."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[int] = set()
        self._hurried = False

    @property
    def pid(self) -> int | None:
        """The process; None: there is none at the moment."""
        return None if self._process is None else self._process.pid

    def ask(self, image: Image, message: dict[str, Any], job: Job) -> dict[str, Any]:
        """Have it do something with an image.

        Args:
            image: the memory.
            message: what to do.
            job: of which this is the work. Once somebody waits for that the helper works like anybody else, and if it
                is stopped the helper is ended in the middle of its work.

        Raises:
            Unavailable: there is no helper, and will be none.
            HelperDied: it ended; what it did until then is not known.
            StorageError, CheckpointError: what it could not do, and why.
        """
        if image.fd is None:
            raise Unavailable("this process can share no memory")
        channel = self._channel or self._start(job)
        fd = None if image.number in self._known else image.fd
        self._known.add(image.number)
        hurry = self._hurried  # who was waited for once is no longer left to idle time
        try:
            channel.send({**message, "image": image.number}, fd)
            answer = self._answer(channel, job, hurry=hurry)
        except (OSError, EOFError) as e:
            raise HelperDied(f"the process that saves in the background {self._kill()}") from e
        except BaseException:
            self._kill(at_once=True)
            raise
        if "done" in answer:
            return answer["done"]  # type: ignore[no-any-return]
        if answer["kind"] == "StorageError":
            raise StorageError(answer["number"], answer["text"])
        raise CheckpointError(f"{answer['kind']}: {answer['text']}")

    def close(self) -> None:
        """End it."""
        if self._end is not None:
            self._end()
        self._channel = self._end = self._process = None
        self._known.clear()

    def _start(self, job: Job) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, *arguments], pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, ValueError) as e:
                ours.close()
                raise Unavailable(str(e)) from e
        channel = Channel(ours)
        self._channel, self._process = channel, process
        self._end = weakref.finalize(self, _end, process, channel, os.getpid())
        try:
            self._answer(channel, job, START)
        except (OSError, EOFError) as e:
            raise Unavailable(f"it {self._kill()} before it had begun") from e
        except BaseException:
            self._kill(at_once=True)
            raise
        return channel

    def _answer(self, channel: Channel, job: Job, patience: float | None = None, hurry: bool = False) -> dict[str, Any]:
        """Wait for what it says, and have it hurry once somebody waits for the job."""
        deadline = None if patience is None else _clock.monotonic() + patience
        poll = select.poll()
        poll.register(channel.socket, select.POLLIN)
        hurried = False
        self._hurried = False
        with _woken(job) as wake:
            poll.register(wake, select.POLLIN)
            while True:
                if (hurry or job.awaited) and not hurried:
                    hurried = True
                    poll.unregister(wake)
                    channel.send({"do": "hurry"})
                    self._hurried = job.awaited
                found = dict(poll.poll(LOOK * 1000))
                if channel.socket.fileno() in found:
                    return channel.receive()[0]
                job.tick()
                if deadline is not None and _clock.monotonic() > deadline:
                    raise TimeoutError

    def _kill(self, at_once: bool = False) -> str:
        """Have it end; says how it did."""
        process = self._process
        if process is None:  # the context was closed meanwhile
            return "was ended"
        ended = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = None if at_once else process.wait(LOOK)  # its connection is gone, so it is about to be
        process.kill()
        self.close()
        if ended is None:
            return "had to be ended"
        return f"was killed by signal {-ended}" if ended < 0 else f"ended with status {ended}"


@contextlib.contextmanager
def _woken(job: Job) -> Iterator[int]:
    """A descriptor that can be read once somebody waits for the job."""
    wake, lock = os.eventfd(0, os.EFD_CLOEXEC), threading.Lock()

    def when_awaited() -> None:
        with lock:
            if wake >= 0:
                os.eventfd_write(wake, 1)

    job.when_awaited = when_awaited
    try:
        yield wake
    finally:
        job.when_awaited = None
        with lock:
            os.close(wake)
            wake = -1


def _end(process: subprocess.Popen[bytes], channel: Channel, pid: int) -> None:
    """Hang up, and see that the process ends; nothing in a forked child, whose process it is not."""
    if os.getpid() != pid:
        return
    channel.close()
    try:
        process.wait(END)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            log.warning("the process %d, which saves in the background, does not end", process.pid)
