"""Requests to a master that are sent until they are answered, for a bounded time."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from det_core import _clock
from det_core._json import dump
from det_core.backend._retry import Backoff
from det_core.backend._wire import Answer, NoAnswer, Wire
from det_core.errors import ContextClosed, MasterDenied, MasterError, MasterUnreachable, UnknownToMaster

logger = logging.getLogger("det_core.master")
READ = 60.0
"""Seconds without a byte after which a request is sent again."""
WARN = 10.0
"""Seconds without an answer after which a person is told."""
OPEN = "/api/v1/master"
"""The one route of ours that asks for no token."""
BUSY = (429, 503)
"""The master did nothing, and says when to come again."""
GATEWAY = (502, 504)
"""Something between here and the master has no answer of it."""


class Credential(NamedTuple):
    """What a request shows."""

    header: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {self.header: f"Bearer {self.token}"}


def credentials(session_token: str | None, user_token: str | None) -> list[Credential]:
    """Those of a task, the better one first: the allocation's own token, then the user's (masters of former times).

    Args:
        session_token: ``DET_SESSION_TOKEN``, or what cluster.json says.
        user_token: ``DET_USER_TOKEN``.
    """
    found = [("Grpc-Metadata-x-allocation-token", session_token), ("Authorization", user_token)]
    return [Credential(header, token) for header, token in found if token]


class MasterSession:
    """Asks one master. May be used by several threads.

    A request is sent again when nothing came back, or the master was busy, until ``patience`` is over: with growing,
    random pauses, that honour ``Retry-After``. So each may arrive twice; the routes of the wire contract bear it, and
    where they do not, ``settled`` says whether the first has arrived.

    Args:
        url: the master's address.
        shown: what to show, the preferred one first; the next is tried when the master has never known it.
        cert_file: see :class:`Wire`.
        cert_name: see :class:`Wire`.
        patience: seconds for which a request is sent again; infinite is fine.
    """

    def __init__(
        self,
        url: str,
        shown: Sequence[Credential] = (),
        *,
        cert_file: str | None = None,
        cert_name: str | None = None,
        patience: float = 600.0,
    ) -> None:
        self.url = url
        self.patience = patience
        self._shown = list(shown)
        self._wire = Wire(url, cert_file, cert_name)
        self._tls = (cert_file, cert_name)
        self._accepted = False
        self._ended = threading.Event()
        self._pid = os.getpid()

    def another(self) -> MasterSession:
        """One like this, with connections of its own."""
        cert_file, cert_name = self._tls
        return MasterSession(self.url, self._shown, cert_file=cert_file, cert_name=cert_name, patience=self.patience)

    def call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        patience: float | None = None,
        read: float = READ,
        settled: Callable[[], bool] | None = None,
        careful: bool = False,
        doubt: bool = False,
        insist: bool = False,
        many: bool = False,
    ) -> Any:
        """Ask, and return the JSON of the answer ({} for an empty one).

        Args:
            method: of HTTP.
            route: with its leading slash.
            body: what is sent as JSON; bytes as they are; None: nothing.
            params: the query.
            patience: other than the session's.
            read: seconds without a byte after which it is sent again.
            settled: asked when the master refuses a request that was sent before without an answer: whether that one
                was carried out, so that the refusal is of no matter.
            careful: ask ``settled`` also before it is sent again, because a second one would count.
            doubt: another process may have sent it before.
            insist: send it again also when the master says 500.
            many: the answer is a stream of JSON lines; a list of them is returned.

        Raises:
            MasterUnreachable: no answer within ``patience``.
            MasterDenied: 401 or 403.
            UnknownToMaster: 404.
            MasterError: any other refusal.
            ContextClosed: the session is closed, or belongs to the process from which this one was forked.
        """
        attempt = _Attempt(self, method, route, self.patience if patience is None else patience)
        attempt.doubt = doubt
        if careful and doubt and settled is not None and settled():
            return {}
        data = None if body is None else body if isinstance(body, bytes) else dump(body)
        while True:
            self.check()
            problem, retry_after = "", None
            try:
                answer = self._wire.send(method, route, self._headers(), data, params, min(read, attempt.left(read)))
            except NoAnswer as e:
                problem, attempt.doubt = str(e), attempt.doubt or e.arrived
            else:
                if 200 <= answer.status < 300:
                    self._accepted = self._accepted or route != OPEN
                    return attempt.decoded(answer, many)
                if answer.status == 401 and len(self._shown) > 1 and not self._accepted:
                    self._shown.pop(0)
                    continue
                if not (answer.status in BUSY + GATEWAY or (insist and answer.status >= 500)):
                    if attempt.doubt and settled is not None and settled():
                        return {}
                    raise attempt.refused(answer)
                attempt.doubt = attempt.doubt or answer.status in GATEWAY
                problem, retry_after = f"{answer.status} {_said(answer)}", answer.headers.get("Retry-After")
            attempt.pause(problem, retry_after, self._ended)
            if careful and attempt.doubt and settled is not None and settled():
                return {}

    def interrupt(self) -> None:
        """Make what is under way fail with MasterUnreachable, now, and all that follows."""
        self._ended.set()
        self._wire.interrupt()

    def close(self) -> None:
        """Let go of the connections. Twice is fine."""
        self._ended.set()
        self._wire.close()

    @property
    def ended(self) -> bool:
        """Whether it was interrupted or closed."""
        return self._ended.is_set()

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": "det_core", "Content-Type": "application/json"}
        return headers | (self._shown[0].headers if self._shown else {})

    def check(self) -> None:
        """Raise ContextClosed in a process forked from the one that made this."""
        if self._pid != os.getpid():
            raise ContextClosed("this process was forked from the one that talks to the master: ask from there")


class _Attempt:
    """One request, however often it is sent."""

    def __init__(self, session: MasterSession, method: str, route: str, patience: float) -> None:
        self.doubt = False
        """Whether it may have been carried out without our knowing."""
        self._what = f"{method} {session.url}{route}"
        self._patience = patience
        self._began = _clock.monotonic()
        self._until = self._began + patience
        self._backoff = Backoff()
        self._warned = False

    def left(self, least: float) -> float:
        """Seconds that it may still take: all that it needs, where there is no second attempt."""
        if self._patience <= 0:
            return least
        left = self._until - _clock.monotonic()
        return left if left > 0.5 else min(least, 10.0)

    def pause(self, problem: str, retry_after: str | None, ended: threading.Event) -> None:
        """Wait before the next attempt; raise if there is none."""
        now = _clock.monotonic()
        wait = self._backoff.next(retry_after)
        if ended.is_set() or now + wait > self._until:
            tried = f"tried for {now - self._began:.0f} s" if self._patience else "tried once"
            raise MasterUnreachable(
                f"{self._what}: no answer ({problem}; {tried}): look whether the master runs "
                "and can be reached from here"
            )
        if not self._warned and now - self._began + wait > WARN:
            self._warned = True
            limit = "" if self._until == float("inf") else f" for {self._until - now:.0f} s more"
            logger.warning("%s: no answer (%s); trying again%s", self._what, problem, limit)
        ended.wait(wait)

    def decoded(self, answer: Answer, many: bool) -> Any:
        """The JSON of an answer."""
        if self._warned:
            logger.warning("%s: the master answers again", self._what)
        try:
            if many:
                return [json.loads(line) for line in answer.body.splitlines() if line.strip()]
            return json.loads(answer.body) if answer.body.strip() else {}
        except ValueError:
            raise MasterError(
                f"{self._what}: what answers there is no master; it is no JSON: {answer.body[:60]!r}",
                answer.status,
            ) from None

    def refused(self, answer: Answer) -> MasterError:
        """The error that says so."""
        said, status = _said(answer), answer.status
        what = f"{self._what}: {status} {said}"
        if 300 <= status < 400:
            to = answer.headers.get("Location", "?")
            return MasterError(f"{what}: it sends elsewhere, to {to}; give the master's own address", status)
        if status == 401:
            return MasterDenied(f"{what}: the token is not valid any more, or is another master's", status)
        if status == 403:
            return MasterDenied(f"{what}: this token may not do that", status)
        if status == 404:
            return UnknownToMaster(what, status)
        return MasterError(what, status)


def _said(answer: Answer) -> str:
    """What an error's body says, in one line."""
    try:
        body = json.loads(answer.body)
        error = body.get("error", body)
        text = error if isinstance(error, str) else error.get("error") or error.get("message") or error.get("reason")
    except (ValueError, AttributeError):
        text = answer.body[:200].decode(errors="replace").strip()
    return " ".join(str(text or answer.reason).split())
