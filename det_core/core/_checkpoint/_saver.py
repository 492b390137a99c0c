"""This process's side of the helper: started at the first save, asked, waited for, replaced when it dies."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

from det_core import _clock
from det_core._errors import CheckpointError, StorageError
from det_core.core._checkpoint._channel import Channel
from det_core.core._checkpoint._image import Image

log = logging.getLogger("det_core.checkpoint")
LOOK = 0.2
"""Seconds between two looks whether the work is to be stopped."""
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
    """A helper process, started when it is first asked, and again after it died. For one thread at a time.

    A lock is not needed for :meth:`hurry`, which any thread may call.
    """

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[int] = set()
        self._busy = False

    def ask(self, image: Image, message: dict[str, Any], tick: Callable[[], None]) -> dict[str, Any]:
        """Have it do something with an image.

        Args:
            image: the memory.
            message: what to do.
            tick: called now and then; what it raises ends the helper in the middle of its work.

        Raises:
            Unavailable: there is no helper, and will be none.
            HelperDied: it ended; what it did until then is not known.
            StorageError, CheckpointError: what it could not do, and why.
        """
        channel = self._channel or self._start(tick)
        number = image.fd
        fd = None if number in self._known else image.fd
        try:
            self._known.add(number)
            channel.send({**message, "image": number}, fd)
            self._busy = True
            answer = self._answer(tick)
        except (OSError, EOFError) as e:
            raise HelperDied(f"the process that saves in the background {self._kill()}") from e
        except BaseException:
            self._kill()
            raise
        finally:
            self._busy = False
        if "done" in answer:
            return answer["done"]  # type: ignore[no-any-return]
        if answer["kind"] == "StorageError":
            raise StorageError(answer["number"], answer["text"])
        raise CheckpointError(f"{answer['kind']}: {answer['text']}")

    def hurry(self) -> None:
        """Somebody waits: have it work like anybody else from now on."""
        if self._busy and (channel := self._channel) is not None:
            try:
                channel.send({"do": "hurry"})
            except OSError as e:
                log.debug("the helper cannot be told to hurry: %s", e)

    def close(self) -> None:
        """End it."""
        if self._end is not None:
            self._end()
        self._channel = self._end = self._process = None
        self._known.clear()

    def _start(self, tick: Callable[[], None]) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, *arguments], pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            except (OSError, ValueError) as e:
                ours.close()
                raise Unavailable(str(e)) from e
        self._channel, self._process = Channel(ours), process
        self._end = weakref.finalize(self, _end, process, self._channel, os.getpid())
        try:
            self._answer(tick, START)
        except (OSError, EOFError) as e:
            raise Unavailable(f"it {self._kill()} before it had begun ({e})") from e
        except BaseException:
            self._kill()
            raise
        return self._channel

    def _answer(self, tick: Callable[[], None], patience: float | None = None) -> dict[str, Any]:
        assert self._channel is not None
        deadline = None if patience is None else _clock.monotonic() + patience
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        while not poll.poll(LOOK * 1000):
            tick()
            if deadline is not None and _clock.monotonic() > deadline:
                raise TimeoutError(f"no word from it for {patience:.0f} s")
        return self._channel.receive()[0]

    def _kill(self) -> str:
        """End it at once; says how it ended."""
        assert self._process is not None
        process = self._process
        ended = process.poll()
        if ended is None:
            try:
                ended = process.wait(LOOK)  # its connection is gone, so it is about to be
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END)
        self.close()
        if ended is None:
            return "had to be ended"
        return f"was killed by signal {-ended}" if ended < 0 else f"ended with status {ended}"


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
