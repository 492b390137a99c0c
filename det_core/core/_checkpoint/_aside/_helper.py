"""The process that saves for a training process, out of its way. It has no torch: what it saves are bytes.

It lives not a moment longer than the process that started it. It does not leave the processors to others (``nice``):
where all of them are busy its work costs the training the same time sooner or later, and somebody may wait for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from det_core.core._checkpoint._aside._channel import Channel
from det_core.core._checkpoint._aside._image import Image
from det_core.core._checkpoint._aside._order import Contents, Order, commit_image, do_all, write_image
from det_core.core._checkpoint._aside._prepare import Announcement, Preparation
from det_core.core._checkpoint._aside._processor import Distance
from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Disk
from det_core.storage._draft import settle

LOOK = 1.0
"""Seconds between two looks whether the parent lives, where the kernel does not tell."""


class Helper:
    """Does orders, one after the other.

    Args:
        channel: where they come from, and answers go.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._images: dict[int, Image] = {}
        self._store: DirectoryStore | None = None
        self._preparation: Preparation | None = None
        self._do: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "prepare": self._prepare, "commit": self._commit, "write": self._write
        }  # fmt: skip

    def serve(self) -> None:
        """Until the other side hangs up."""
        distance = Distance([threading.get_native_id()])
        with contextlib.suppress(EOFError, ConnectionError):  # whoever started it is gone
            self._channel.send({"ready": os.getpid()})
            while True:
                message, fd = self._channel.receive()
                if fd is not None:
                    self._images[message["image"]] = Image(fd)
                if "processor" in message:
                    distance.keep(message["processor"])
                if (answer := self._answer(message)) is not None:
                    self._channel.send(answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Do what a message says; what is to be said of it."""
        try:
            done = self._do[message["do"]](message)
        except StorageError as e:
            return {"kind": "StorageError", "number": e.errno, "text": str(e.args[-1])}
        except Exception as e:
            return {"kind": type(e).__name__, "number": None, "text": str(e)}
        return None if done is None else {"done": done}

    def _prepare(self, message: dict[str, Any]) -> None:
        self._preparation = Preparation(self._store_of(message["root"]), Announcement.decode(message["announcement"]))
        self._preparation.run()

    def _commit(self, message: dict[str, Any]) -> dict[str, Any]:
        order, image = Order.decode(message["order"]), self._images[message["image"]]
        store, prepared = self._store_of(message["root"]), self._preparation
        self._preparation, draft, flushed = None, None, False
        if prepared is not None and prepared.storage_id == order.storage_id:
            draft, flushed = prepared.draft, prepared.flushed
        elif message["prepared"]:  # by another process, which is gone
            settle(store, order.storage_id, order.owner)
        manifest = do_all(commit_image(store, order, image, draft))
        return {**order.encode_outcome(manifest), "flushed": flushed}

    def _write(self, message: dict[str, Any]) -> dict[str, Any]:
        contents, image = Contents(**message["contents"]), self._images[message["image"]]
        return {"size": do_all(write_image(Disk(message["root"]), message["path"], image, contents)).size}

    def _store_of(self, root: str) -> DirectoryStore:
        """The one of this root, which looks after what others left there before it begins its first checkpoint."""
        if self._store is None or self._store.root != root:
            self._store = DirectoryStore(root)
        return self._store


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


def main(incoming: int, outgoing: int, parent: int) -> None:
    """What runs in the process, with the descriptors of its ends of the connection."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    Helper(Channel(socket.socket(fileno=incoming), socket.socket(fileno=outgoing))).serve()
    os._exit(0)
