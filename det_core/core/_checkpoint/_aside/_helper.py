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
from collections.abc import Callable
from typing import Any

from det_core._errors import StorageError
from det_core.core._checkpoint._aside._channel import Channel
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents, Order, Steps, commit_image, write_image
from det_core.core._checkpoint._aside._prepare import Announcement, Preparation
from det_core.core._checkpoint._aside._processor import Distance
from det_core.storage import DirectoryStore, Disk

NICE = 5
"""The thread that nobody waits for gets a quarter of a processor that others want as well; see :manpage:`sched(7)`.

With little more than nothing it would not be done before the next checkpoint, which then waits. Nor did that cost the
training less, even where a processor is free.
"""
LOOK = 1.0
"""Seconds between two looks whether the parent lives, where the kernel does not tell."""


class Task:
    """One order, done a step at a time by whichever thread has the turn.

    Args:
        steps: what is to be done.
        quiet: nobody wants to hear what came of it.
    """

    def __init__(self, steps: Steps[dict[str, Any]], *, quiet: bool = False) -> None:
        self._steps = steps
        self._quiet = quiet
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
            return {} if self._quiet else answer

    def finish(self) -> dict[str, Any]:
        """Do all that is left of it, or see another thread do it; the answer, if it was this one that did the last."""
        while (answer := self.step()) is None:
            continue
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
        self._last: DirectoryStore | None = None
        self._prepared: dict[str, tuple[Preparation, Task]] = {}

    def serve(self) -> None:
        """Until the other side hangs up."""
        idle = threading.Thread(target=self._idle, daemon=True)
        idle.start()
        distance = Distance([threading.get_native_id(), idle.native_id or 0])
        with contextlib.suppress(OSError):  # whoever started it may be gone, which the next line tells
            self._channel.send({"ready": os.getpid()})
        while True:
            try:
                message, fd = self._channel.receive()
            except EOFError:
                return
            if fd is not None:
                self._images[message["image"]] = Image(fd)
            if "processor" in message:
                distance.keep(message["processor"])
            if message["do"] == "hurry":
                if self._task is not None:
                    self._work(self._task)
            else:
                self._task = getattr(self, f"_{message['do']}")(message)
                self._tasks.put(self._task)

    def _prepare(self, message: dict[str, Any]) -> Task:
        preparation = Preparation(self._store(message["root"]), Announcement.decode(message["announcement"]))
        task = Task(_once(preparation.run), quiet=True)
        self._prepared[message["announcement"]["storage_id"]] = preparation, task
        return task

    def _commit(self, message: dict[str, Any]) -> Task:
        order, image = Order.decode(message["order"]), self._images[message["image"]]
        store, prepared = self._store(message["root"]), self._prepared.pop(order.storage_id, None)

        def steps() -> Steps[dict[str, Any]]:
            staging, flushed = None, False
            if prepared is not None:
                preparation, before = prepared
                before.finish()
                staging, flushed = preparation.staging, preparation.flushed
            elif message["prepared"]:  # by another process, which is gone
                store.settle(order.storage_id, order.owner)
            manifest = yield from commit_image(store, order, image, staging)
            return {**order.encode_outcome(manifest), "flushed": flushed}

        return Task(steps())

    def _write(self, message: dict[str, Any]) -> Task:
        contents, image = Contents(**message["contents"]), self._images[message["image"]]

        def steps() -> Steps[dict[str, Any]]:
            entry = yield from write_image(Disk(message["root"]), message["path"], image, contents)
            return {"size": entry.size}

        return Task(steps())

    def _store(self, root: str) -> DirectoryStore:
        """The one of this root, which looks after what others left there before it begins its first checkpoint."""
        if self._last is None or self._last.root != root:
            self._last = DirectoryStore(root)
        return self._last

    def _idle(self) -> None:
        """Work at low priority."""
        with contextlib.suppress(OSError):  # else it competes like anybody else
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            self._work(self._tasks.get())

    def _work(self, task: Task) -> None:
        if answer := task.finish():
            try:
                self._channel.send(answer)
            except OSError:
                os._exit(1)  # nobody listens


def _once(function: Callable[[], object]) -> Steps[dict[str, Any]]:
    """A single step."""
    function()
    yield 0
    return {}


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
