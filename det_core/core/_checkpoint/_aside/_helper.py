"""The process that saves for a training process, out of its way. It has no torch: what it saves are bytes.

It leaves the processors to others (``nice``), until somebody waits for it; and it lives not a moment longer than the
process that started it. Under SCHED_IDLE it would cost a little less, but on a busy machine the thread that works for
nobody could then keep Python's lock for seconds from the one that somebody waits for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
from typing import Any

from det_core._errors import StorageError
from det_core.core._checkpoint._aside._channel import Channel
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents, Order, Steps, commit_image, write_image
from det_core.storage import DirectoryStore, Disk

NICE = 5
"""The thread that nobody waits for gets a quarter of a processor that others want as well; see :manpage:`sched(7)`.

With little more than nothing it would not be done before the next checkpoint, which then waits. Nor did that cost the
training less, even where a processor is free.
"""
LOOK = 1.0
"""Seconds between two looks whether the parent lives, where the kernel does not tell."""


class Task:
    """One order, done a step at a time by whichever thread has the turn."""

    def __init__(self, steps: Steps[dict[str, Any]]) -> None:
        self._steps = steps
        self._turn = threading.Lock()
        self._over = False

    def step(self) -> dict[str, Any] | None:
        """Do the next step; the answer, if that was the last; None: there are more."""
        with self._turn:
            if self._over:
                return {}
            try:
                next(self._steps)
                return None
            except StopIteration as e:
                answer: dict[str, Any] = {"done": e.value}
            except StorageError as e:
                answer = {"kind": "StorageError", "number": e.errno, "text": str(e.args[-1])}
            except Exception as e:
                answer = {"kind": type(e).__name__, "number": None, "text": str(e)}
            self._over = True
            return answer


class Helper:
    """Does orders, one after the other.

    Args:
        channel: where they come from, and answers go.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._images: dict[int, Image] = {}
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._task: Task | None = None

    def serve(self) -> None:
        """Until the other side hangs up."""
        threading.Thread(target=self._idle, daemon=True).start()
        self._channel.send({"ready": os.getpid()})
        while True:
            try:
                message, fd = self._channel.receive()
            except EOFError:
                return
            if fd is not None:
                self._images[message["image"]] = Image(fd)
            if message["do"] == "hurry":
                if self._task is not None:
                    self._work(self._task)
            else:
                self._task = Task(self._steps(message))
                self._tasks.put(self._task)

    def _steps(self, message: dict[str, Any]) -> Steps[dict[str, Any]]:
        image = self._images[message["image"]]
        if message["do"] == "commit":
            manifest = yield from commit_image(DirectoryStore(message["root"]), Order.decode(message["order"]), image)
            return {"manifest": manifest.encode().decode()}
        contents = Contents(**message["contents"])
        entry = yield from write_image(Disk(message["root"]), message["path"], image, contents)
        return {"size": entry.size}

    def _idle(self) -> None:
        """Work at low priority."""
        with contextlib.suppress(OSError):  # else it competes like anybody else
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            self._work(self._tasks.get())

    def _work(self, task: Task) -> None:
        while (answer := task.step()) is None:
            pass
        if answer:
            try:
                self._channel.send(answer)
            except OSError:
                os._exit(1)  # nobody listens


def end_with(parent: int) -> None:
    """End this process as soon as another one has ended, in the middle of whatever it does."""
    try:
        watched = os.pidfd_open(parent)
    except (OSError, AttributeError):
        watched = None
    while os.getppid() == parent:
        if watched is None:
            threading.Event().wait(LOOK)
        else:
            select.select([watched], [], [])
    os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """What runs in the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    Helper(Channel(socket.socket(fileno=descriptor))).serve()
    os._exit(0)
