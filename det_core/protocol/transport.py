"""HTTP to one master: retries, credentials, interruption.

A request is sent again while no answer comes or the master is busy, so it may arrive twice. Every route of the wire
contract bears that (section 2.1), except those that are sent with ``once``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core._json import dump
from det_core.errors import ContextClosed, MasterDenied, MasterError, MasterUnreachable, UnknownToMaster

if TYPE_CHECKING:
    from requests import Response

logger = logging.getLogger("det_core.master")

IDLE_TIMEOUT = 60.0
"""Maximum wait for the next byte of an answer, in seconds."""
MIN_IDLE_TIMEOUT = 5.0
"""Least wait for an answer to the last attempt before the deadline, in seconds: a loaded master needs some."""
WARN_DELAY = 10.0
"""Time without an answer until a warning, in seconds."""
FIRST_DELAY = 0.1
"""Largest delay before the second attempt, in seconds; it doubles with each further one."""
MAX_DELAY = 10.0
MAX_RETRY_AFTER_SECONDS = 300
OPEN_ROUTE = "/api/v1/master"
"""The one route of our master that needs no token."""
BUSY = (429, 503)
"""Statuses of a master that did nothing, and may say when to try again."""
GATEWAY = (502, 504)
"""Statuses of a proxy without an answer from the master, which may have received the request."""
REJECTIONS: dict[int, tuple[type[MasterError], str]] = {
    401: (MasterDenied, ": the token is no longer valid, or is another master's"),
    403: (MasterDenied, ": this token may not do that"),
    404: (UnknownToMaster, ""),
}
"""Status to the error it is raised as, and a hint."""
_RANDOM = SystemRandom()  # the global generator's numbers are the script's


class MasterSession:
    """Requests to one master, from any thread of the process that created the session.

    Args:
        url: The master's address, with scheme and without a trailing slash.
        session_token: Token of an allocation, as ``DET_SESSION_TOKEN``.
        user_token: Token of a user; beside a session token, it is for masters of earlier releases, which expect it.
        cert_file: PEM file of certificates to trust beside those of ``requests``, or ``noverify``.
        cert_name: Name in the master's certificate, if it is not the host's.
        timeout: Time during which a request is sent again, in seconds; may be infinite.

    Raises:
        MasterError: If ``cert_file`` has no certificates.
    """

    def __init__(
        self,
        url: str,
        *,
        session_token: str | None = None,
        user_token: str | None = None,
        cert_file: str | None = None,
        cert_name: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        from det_core.protocol._connections import Connections

        self.url = url
        self.timeout = timeout
        self._tokens = {"session_token": session_token, "user_token": user_token}
        self._certificate = {"cert_file": cert_file, "cert_name": cert_name}
        pairs = [("Grpc-Metadata-x-allocation-token", session_token), ("Authorization", user_token)]
        self._headers = [{header: f"Bearer {token}"} for header, token in pairs if token] or [{}]
        """Headers with a token, preferred first; the next are tried while the master has accepted none."""
        self._is_accepted = False
        self._connections = Connections(url, cert_file, cert_name)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pid = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether the session was interrupted or closed."""
        return self._closed.is_set()

    def clone(self) -> MasterSession:
        """Return a session like this one with connections of its own, to be interrupted by itself."""
        return MasterSession(self.url, **self._tokens, **self._certificate, timeout=self.timeout)

    def call(
        self,
        method: str,
        route: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        once: bool = False,
        retry_server_errors: bool = False,
    ) -> Any:
        """Send a request until it is answered, and return the answer's JSON, or {} if it is empty.

        Args:
            method: HTTP method.
            route: Path below the master's address, with a leading slash.
            body: Value sent as JSON; bytes are sent as they are, None sends no body.
            params: Query parameters; those that are None are left out.
            timeout: Time during which the request is sent again, in seconds; 0 sends it once. Defaults to the
                session's.
            idle_timeout: Maximum wait of an attempt for the next byte, in seconds. Defaults to the time left, at most
                :data:`IDLE_TIMEOUT`.
            once: Whether not to send the request again once it may have arrived.
            retry_server_errors: Whether to send the request again after a status of 500 or above.

        Raises:
            MasterUnreachable: If no answer came within ``timeout``.
            MasterDenied: If the master answered 401 or 403.
            UnknownToMaster: If the master answered 404.
            MasterError: If the request was rejected otherwise, or the certificate is not trusted.
            ContextClosed: In a process forked from the one that created the session.
        """
        if timeout is None:
            timeout = self.timeout
        attempts = _Attempts(f"{method} {self.url}{route}", timeout, idle_timeout)
        data = body if body is None or isinstance(body, bytes) else dump(body)
        request = {"method": method, "url": self.url + route, "params": params, "data": data}
        with self._answer(attempts, request, once, retry_server_errors) as response:
            return attempts.decode(response.content)

    @contextmanager
    def stream(
        self, route: str, params: Mapping[str, Any] | None = None, *, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the results in a stream of JSON lines, each as soon as it arrives.

        Args:
            route: Path below the master's address, with a leading slash.
            params: Query parameters; those that are None are left out.
            idle_timeout: Maximum wait for the next byte, in seconds.

        Raises:
            MasterError: As :meth:`call` does, and if the stream ends early.
        """
        attempts = _Attempts(f"GET {self.url}{route}", self.timeout, idle_timeout)
        request = {"method": "GET", "url": self.url + route, "params": params, "stream": True}
        with self._answer(attempts, request) as response:
            yield attempts.results(response)

    def interrupt(self) -> None:
        """Make requests that are under way, and all later ones, raise MasterUnreachable."""
        self._closed.set()
        self._connections.interrupt()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._closed.set()
        self._connections.close()

    def raise_if_forked(self) -> None:
        """Raise ContextClosed in a process forked from the one that created the session."""
        if self._pid != os.getpid():
            raise ContextClosed("this process was forked from the one that talks to the master: ask from there")

    def _answer(
        self,
        attempts: _Attempts,
        request: Mapping[str, Any],
        once: bool = False,
        retry_server_errors: bool = False,
    ) -> Response:
        """Return the first answer that is a success."""
        from det_core.protocol._connections import NoAnswer

        while True:
            self.raise_if_forked()
            headers = self._headers[0]
            retry_after = None
            try:
                response = self._connections.send(request, headers, attempts.idle_timeout())
            except NoAnswer as e:
                problem = str(e)
                attempts.maybe_applied |= e.maybe_sent
            else:
                status = response.status_code
                if 200 <= status < 300:
                    self._is_accepted |= not request["url"].endswith(OPEN_ROUTE)
                    attempts.log_recovery()
                    return response
                if status == 401 and self._has_other_token(headers):
                    continue
                if status not in BUSY + GATEWAY and not (retry_server_errors and status >= 500):
                    raise attempts.rejection(response)
                attempts.maybe_applied |= status not in BUSY
                problem = f"{status} {_reason(response)}"
                retry_after = response.headers.get("Retry-After")
            if once and attempts.maybe_applied:
                raise attempts.unreachable(f"{problem}; the master may have received the request")
            attempts.wait(problem, retry_after, self._closed)

    def _has_other_token(self, rejected: Mapping[str, str]) -> bool:
        """Return whether another token is worth an attempt after these headers were rejected."""
        with self._lock:
            # Another thread may have dropped the token in the meantime: then its successor was not tried here.
            if self._headers[0] is not rejected:
                return True
            # Once one was accepted, a 401 means that its allocation has ended, and no other token may stand in.
            if self._is_accepted or len(self._headers) < 2:
                return False
            self._headers.pop(0)
            return True


class _Attempts:
    """The attempts of one request: their deadline, delays, log lines, results and errors."""

    def __init__(self, request: str, timeout: float, idle_timeout: float | None) -> None:
        self.maybe_applied = False
        """Whether the master may have carried out an attempt whose answer is lost."""
        self._request = request
        self._timeout = timeout
        self._idle_timeout = idle_timeout
        self._began = _clock.monotonic()
        self._deadline = self._began + timeout
        self._count = 0
        self._warned = False

    def idle_timeout(self) -> float:
        """Return the maximum wait of the next attempt for a byte, in seconds."""
        if self._idle_timeout is not None:
            return self._idle_timeout
        if self._timeout <= 0:
            return IDLE_TIMEOUT
        return min(IDLE_TIMEOUT, max(MIN_IDLE_TIMEOUT, self._deadline - _clock.monotonic()))

    def wait(self, problem: str, retry_after: str | None, closed: threading.Event) -> None:
        """Wait until the next attempt, or raise MasterUnreachable if it would be too late."""
        now = _clock.monotonic()
        delay = retry_delay(self._count, retry_after)
        if closed.is_set() or now + delay > self._deadline:
            raise self.unreachable(problem)
        self._count += 1
        if not self._warned and now - self._began + delay > WARN_DELAY:
            self._warned = True
            left = self._deadline - now
            limit = "" if left == float("inf") else f" for {left:.0f} s more"
            logger.warning("%s: no answer (%s); retrying%s", self._request, problem, limit)
        closed.wait(delay)

    def log_recovery(self) -> None:
        """Log that the master answers, if a warning said that it does not."""
        if self._warned:
            logger.warning("%s: the master answers again", self._request)

    def unreachable(self, problem: str) -> MasterUnreachable:
        """Return the error for a request without an answer."""
        tried = "tried once"
        if self._count:
            tried = f"tried for {_clock.monotonic() - self._began:.0f} s"
        text = f"no answer ({problem}; {tried}): check that the master runs and can be reached from here"
        return MasterUnreachable(f"{self._request}: {text}", detail=problem, maybe_applied=self.maybe_applied)

    def rejection(self, response: Response) -> MasterError:
        """Return the error for an answer that is not a success."""
        status = response.status_code
        reason = _reason(response)
        shown = " ".join((reason or response.reason or "").split())
        kind, hint = REJECTIONS.get(status, (MasterError, ""))
        if 300 <= status < 400:
            hint = f": redirects to {response.headers.get('Location', '?')}; use the master's own address"
        text = f"{self._request}: {status} {shown}{hint}"
        return kind(text, status, detail=reason, maybe_applied=self.maybe_applied)

    def decode(self, content: bytes) -> Any:
        """Return the JSON of an answer."""
        try:
            return json.loads(content.strip() or b"{}")
        except ValueError:
            raise MasterError(f"{self._request}: not a master: answer is not JSON: {content[:60]!r}", 200) from None

    def results(self, response: Response) -> Iterator[Any]:
        """Yield the results in the lines of a stream."""
        from det_core.protocol._connections import NoAnswer, read_lines

        try:
            # A followed stream has blank lines while nothing happens, against the idle timeout.
            for line in filter(None, read_lines(response)):
                value = self.decode(line)
                if "error" in value:
                    reason = _reason_of(value) or "the stream failed"
                    raise MasterError(f"{self._request}: {reason}", 500, detail=reason)
                yield value.get("result", value)
        except NoAnswer as e:
            raise self.unreachable(str(e)) from e


def retry_delay(attempts: int, retry_after: str | None = None, random: Callable[[], float] = _RANDOM.random) -> float:
    """Return the seconds to wait after so many failed attempts: growing, and different in each process.

    Args:
        attempts: Number of delays before this one.
        retry_after: Header of that name; only seconds are heeded, not dates.
        random: Returns a number from 0 to 1.
    """
    ceiling = min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(attempts, 30))
    if retry_after is not None and retry_after.strip().isdecimal():
        return min(int(retry_after), MAX_RETRY_AFTER_SECONDS) + ceiling * random() / 2
    return ceiling * (0.5 + random() / 2)


def _reason(response: Response) -> str:
    """Return the text of an error's body (wire contract, section 2.2), or an empty one."""
    try:
        reason = _reason_of(response.json())
    except ValueError:
        reason = response.content[:200].decode(errors="replace").strip()
    return str(reason or "")


def _reason_of(body: Any) -> Any:
    if not isinstance(body, Mapping):
        return None
    error = body.get("error", body)
    if not isinstance(error, Mapping):
        return error
    return next((error[key] for key in ("error", "message", "detail", "reason") if error.get(key)), None)
