"""A search in a process of its own, which answers one request after the other.

A user's class and Optuna's samplers may take long, hold the interpreter, hang or crash. In a process of its own such a
search stops nothing but itself, and can be killed. A message is its length in four bytes, then JSON.

Requests: ``{"create": [searcher, hyperparameters, seed, folder], "record": [[event, actions], …]}`` first, then
``{"event": event}`` for the next decision and ``{"progress": [event, …]}`` for events that are not recorded. Replies:
``{"actions": […], "progress": fraction, "event_kinds": […]}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import traceback
from typing import IO

from det_core._standalone.processes import set_parent_death_signal
from det_core.errors import DetCoreError
from det_core.search._create import create_search
from det_core.search._events import JSON, Action, action_from_dict, event_from_dict
from det_core.search._search import Search

LENGTH = struct.Struct(">I")


class Responder:
    """The search of this process and its answers to requests."""

    def __init__(self) -> None:
        self._search: Search | None = None

    def reply(self, request: JSON) -> JSON:
        """Return the reply to a request, whatever the search raises."""
        try:
            if "create" in request:
                self._create(request)
            actions = self._carry_out(request)
            return {
                "actions": [action.to_dict() for action in actions],
                "event_kinds": sorted(self._search.event_kinds) if self._search is not None else [],
                "progress": self._progress(),
            }
        except BaseException as e:  # also SystemExit: what a user's method raises is its answer
            is_plain = "create" in request and isinstance(e, (DetCoreError, ValueError))
            if not isinstance(e, (DetCoreError, ValueError)):
                traceback.print_exc()
            return {"error": str(e) if is_plain else f"{type(e).__name__}: {e}"}

    def _create(self, request: JSON) -> None:
        searcher, hyperparameters, seed, folder = request["create"]
        self._search = create_search(searcher, hyperparameters, seed, folder=folder)
        for event, actions in request["record"]:
            self._search.apply(event_from_dict(event), [action_from_dict(action) for action in actions])

    def _carry_out(self, request: JSON) -> list[Action]:
        assert self._search is not None, "the first request creates the search"
        for event in request.get("progress", ()):
            self._search.handle(event_from_dict(event))
        if "event" not in request:
            return []
        return self._search.handle(event_from_dict(request["event"]))

    def _progress(self) -> float | None:
        assert self._search is not None
        try:
            return self._search.progress()
        except Exception:  # a user's method: what it says is only shown
            traceback.print_exc()
            return None


def encode(message: JSON) -> bytes:
    """Return a message as it is sent."""
    text = json.dumps(message).encode()
    return LENGTH.pack(len(text)) + text


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    responder = Responder()
    while header := requests.read(LENGTH.size):
        (length,) = LENGTH.unpack(header)
        reply = responder.reply(json.loads(requests.read(length)))
        try:
            message = encode(reply)
        except (TypeError, ValueError) as e:  # hyperparameters of a user's method
            message = encode({"error": f"its decision cannot be recorded: {type(e).__name__}: {e}"})
        replies.write(message)
        replies.flush()


def main(parent: int) -> None:
    """Serve the requests of this process's parent until it closes the pipe, or dies."""
    # The closed pipe alone would not end a search that hangs.
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died before that could count
        return
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a user's method prints must not get between the replies, nor may it read the requests.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(requests, replies)
