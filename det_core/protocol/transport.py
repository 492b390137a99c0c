"""HTTP to one master: retries, credentials, interruption, certificates and proxies.

A request is sent again while no answer comes or the master is busy, so it may arrive twice. Every route of the wire
contract bears that (section 2.1), except those that are sent with ``once``.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from det_core import _clock
from det_core._json import dump
from det_core.errors import ContextClosed, MasterDenied, MasterError, MasterUnreachable, UnknownToMaster

# requests takes longer to import than all the rest of det_core.core: it is imported where a connection is made.
if TYPE_CHECKING:
    import ssl

    import requests

logger = logging.getLogger("det_core.master")

CONNECT_TIMEOUT = 10.0
"""Maximum wait for a connection, in seconds."""
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
STREAM_CHUNK_BYTES = 1 << 16
OPEN_ROUTE = "/api/v1/master"
"""The one route of our master that needs no token."""
BUSY = (429, 503)
"""Statuses of a master that did nothing, and may say when to try again."""
GATEWAY = (502, 504)
"""Statuses of a proxy without an answer from the master, which may have received the request."""
_RANDOM = SystemRandom()  # the global generator's numbers are the script's
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Credential(NamedTuple):
    """A bearer token and the header it is sent in."""

    header: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        """The header with the token."""
        return {self.header: f"Bearer {self.token}"}


def credentials(session_token: str | None, user_token: str | None) -> list[Credential]:
    """Return the credentials of a task, preferred first.

    Args:
        session_token: ``DET_SESSION_TOKEN``, or the token of cluster.json.
        user_token: ``DET_USER_TOKEN``, which masters of earlier releases expect.
    """
    pairs = [("Grpc-Metadata-x-allocation-token", session_token), ("Authorization", user_token)]
    return [Credential(header, token) for header, token in pairs if token]


class MasterSession:
    """Requests to one master, from any thread of the process that created the session.

    Args:
        url: The master's address, with scheme and without a trailing slash.
        credentials: Preferred first; the next is tried while the master has accepted none.
        cert_file: PEM file of certificates to trust beside those of ``requests``, or ``noverify``.
        cert_name: Name in the master's certificate, if it is not the host's.
        timeout: Time during which a request is sent again, in seconds; may be infinite.
    """

    def __init__(
        self,
        url: str,
        credentials: Sequence[Credential] = (),
        *,
        cert_file: str | None = None,
        cert_name: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.url = url
        self.timeout = timeout
        self._credentials = credentials
        self._headers = [credential.headers for credential in credentials] or [{}]
        self._is_accepted = False
        self._connections = _Connections(url, cert_file, cert_name)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pid = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether the session was interrupted or closed."""
        return self._closed.is_set()

    def clone(self) -> MasterSession:
        """Return a session like this one with connections of its own, to be interrupted by itself."""
        names = {"cert_file": self._connections.cert_file, "cert_name": self._connections.cert_name}
        return MasterSession(self.url, self._credentials, timeout=self.timeout, **names)

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
            yield _results(attempts, response)

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
    ) -> requests.Response:
        """Return the first answer that is a success."""
        while True:
            self.raise_if_forked()
            headers = self._headers[0]
            retry_after = None
            try:
                response = self._connections.send(request, headers, attempts.idle_timeout())
            except _NoAnswer as e:
                problem = str(e)
                attempts.maybe_applied |= e.maybe_sent
            else:
                status = response.status_code
                if 200 <= status < 300:
                    self._is_accepted |= not request["url"].endswith(OPEN_ROUTE)
                    attempts.log_recovery()
                    return response
                if status == 401 and self._has_other_credential(headers):
                    continue
                if status not in BUSY + GATEWAY and not (retry_server_errors and status >= 500):
                    raise attempts.rejection(response)
                attempts.maybe_applied |= status not in BUSY
                problem = f"{status} {_reason(response)}"
                retry_after = response.headers.get("Retry-After")
            if once and attempts.maybe_applied:
                raise attempts.unreachable(f"{problem}; the master may have received the request")
            attempts.wait(problem, retry_after, self._closed)

    def _has_other_credential(self, rejected: Mapping[str, str]) -> bool:
        """Return whether another credential is worth an attempt after these headers were rejected."""
        with self._lock:
            # Another thread may have dropped the credential in the meantime: then its successor was not tried here.
            if self._headers[0] is not rejected:
                return True
            # Once one was accepted, a 401 means that its allocation has ended, and no other token may stand in.
            if self._is_accepted or len(self._headers) < 2:
                return False
            self._headers.pop(0)
            return True


class _Attempts:
    """The attempts of one request: their deadline, delays, log lines and errors."""

    def __init__(self, request: str, timeout: float, idle_timeout: float | None) -> None:
        self.maybe_applied = False
        """Whether the master may have carried out an attempt whose answer is lost."""
        self.request = request
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
            logger.warning("%s: no answer (%s); retrying%s", self.request, problem, limit)
        closed.wait(delay)

    def log_recovery(self) -> None:
        """Log that the master answers, if a warning said that it does not."""
        if self._warned:
            logger.warning("%s: the master answers again", self.request)

    def unreachable(self, problem: str) -> MasterUnreachable:
        """Return the error for a request without an answer."""
        tried = "tried once"
        if self._count:
            tried = f"tried for {_clock.monotonic() - self._began:.0f} s"
        text = f"no answer ({problem}; {tried}): check that the master runs and can be reached from here"
        return MasterUnreachable(f"{self.request}: {text}", detail=problem, maybe_applied=self.maybe_applied)

    def rejection(self, response: requests.Response) -> MasterError:
        """Return the error for an answer that is not a success."""
        status = response.status_code
        reason = _reason(response)
        shown = " ".join((reason or response.reason or "").split())
        kind = MasterError
        hint = ""
        if 300 <= status < 400:
            hint = f": redirects to {response.headers.get('Location', '?')}; use the master's own address"
        elif status == 401:
            kind = MasterDenied
            hint = ": the token is no longer valid, or is another master's"
        elif status == 403:
            kind = MasterDenied
            hint = ": this token may not do that"
        elif status == 404:
            kind = UnknownToMaster
        text = f"{self.request}: {status} {shown}{hint}"
        return kind(text, status, detail=reason, maybe_applied=self.maybe_applied)

    def decode(self, content: bytes) -> Any:
        """Return the JSON of an answer."""
        try:
            return json.loads(content.strip() or b"{}")
        except ValueError:
            raise MasterError(f"{self.request}: not a master: answer is not JSON: {content[:60]!r}", 200) from None


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


def _results(attempts: _Attempts, response: requests.Response) -> Iterator[Any]:
    """Yield the results in the lines of a stream."""
    import requests

    try:
        for line in response.iter_lines(STREAM_CHUNK_BYTES):
            # A followed stream has blank lines while nothing happens, against the idle timeout.
            if not line:
                continue
            value = attempts.decode(line)
            if "error" in value:
                reason = _reason_of(value) or "the stream failed"
                raise MasterError(f"{attempts.request}: {reason}", 500, detail=reason)
            yield value.get("result", value)
    except requests.exceptions.RequestException as e:
        raise attempts.unreachable(_innermost(e)) from e


def _reason(response: requests.Response) -> str:
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


class _NoAnswer(Exception):
    """A connection that failed before a whole answer.

    Attributes:
        maybe_sent: Whether the master may have received the request.
    """

    def __init__(self, reason: str, maybe_sent: bool) -> None:
        super().__init__(reason)
        self.maybe_sent = maybe_sent


class _Connections:
    """Connections of ``requests`` to one master, which can be interrupted. Thread-safe."""

    def __init__(self, url: str, cert_file: str | None, cert_name: str | None) -> None:
        self.cert_file = cert_file
        self.cert_name = cert_name
        self._url = url
        self._lock = threading.Lock()
        self._session: requests.Session | None = None
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interrupted = False

    def send(self, request: Mapping[str, Any], headers: Mapping[str, str], idle_timeout: float) -> requests.Response:
        """Send a request once.

        Raises:
            _NoAnswer: If the connection failed.
            MasterError: If the certificate is not trusted: another attempt would fail, too.
        """
        import requests

        try:
            response = self._opened().request(
                **request,
                headers={"User-Agent": "det_core", "Content-Type": "application/json", **headers},
                timeout=(min(CONNECT_TIMEOUT, idle_timeout), idle_timeout),
                # Said here, as a session's own would yield to REQUESTS_CA_BUNDLE.
                verify=False if self.cert_file == "noverify" else None,
                allow_redirects=False,  # a POST would become a GET
            )
            if response.status_code >= 300:
                response.content  # noqa: B018  # read while a failure is still one of the attempt
            return response
        except requests.exceptions.RequestException as e:
            if isinstance(e, requests.exceptions.SSLError) and "CERTIFICATE" in str(e).upper():
                raise self._untrusted(e) from e
            raise _NoAnswer(_innermost(e), maybe_sent=not _is_unsent(e)) from e

    def interrupt(self) -> None:
        """Fail requests that are under way, and all later ones."""
        self._interrupted = True
        for connection in list(self._open):
            if (sock := getattr(connection, "sock", None)) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            session = self._session
            self._session = None
        if session is not None:
            session.close()
        for connection in list(self._open):  # an error that is still referenced keeps its pool from closing
            connection.close()

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise _NoAnswer("the connection to the master is closed", maybe_sent=False)

    def _opened(self) -> requests.Session:
        self._raise_if_interrupted()
        with self._lock:
            if self._session is None:
                self._session = self._new_session()
            return self._session

    def _new_session(self) -> requests.Session:
        import requests

        session = requests.Session()
        session.auth = lambda request: request  # else requests looks into ~/.netrc, and overwrites the token
        host = urlsplit(self._url).hostname
        session.trust_env = host not in _LOOPBACK  # no proxy to this machine
        if self.cert_file == "noverify":
            warnings.filterwarnings("ignore", message=f"Unverified HTTPS request is being made to host '{host}'")
        adapter = _new_adapter(self._tls_options(), self._open, self._raise_if_interrupted)
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        return session

    def _tls_options(self) -> dict[str, Any]:
        """Return arguments of urllib3's pools for ``cert_file`` and ``cert_name``."""
        options: dict[str, Any] = {}
        if self.cert_name is not None:
            options = {"server_hostname": self.cert_name, "assert_hostname": self.cert_name}
        if self._url.startswith("https") and self.cert_file not in (None, "", "noverify"):
            options["ssl_context"] = self._ssl_context()
        return options

    def _ssl_context(self) -> ssl.SSLContext:
        import ssl

        context = ssl.create_default_context()
        try:
            context.load_verify_locations(self.cert_file)
        except (OSError, ssl.SSLError) as e:
            text = f"DET_MASTER_CERT_FILE={self.cert_file} has no certificates: {e}"
            raise MasterError(text, detail=text) from e
        return context

    def _untrusted(self, error: Exception) -> MasterError:
        text = (
            f"the certificate of the master at {self._url} is not trusted ({_innermost(error)}): set "
            "DET_MASTER_CERT_FILE to the PEM file that signs it, and DET_MASTER_CERT_NAME to the name in it if that "
            "is not the host's"
        )
        return MasterError(text, detail=text)


def _new_adapter(tls: Mapping[str, Any], opened: weakref.WeakSet[Any], check: Callable[[], None]) -> Any:
    """Return an adapter of ``requests`` that adds its connections to ``opened``, and checks each once it is open."""
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    class Plain(HTTPConnection):
        def connect(self) -> None:
            opened.add(self)
            super().connect()
            check()  # an interrupt() in the meantime has not seen the socket

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            opened.add(self)
            super().connect()
            check()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    pools = {"http": PlainPool, "https": SecurePool}

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **options: Any) -> None:
            super().init_poolmanager(connections, maxsize, block, **options, **tls)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            manager = super().proxy_manager_for(proxy, **options, **tls)
            manager.pool_classes_by_scheme = pools
            return manager

    return Adapter()


def _is_unsent(error: requests.exceptions.RequestException) -> bool:
    """Return whether a request certainly did not arrive, for lack of a connection."""
    from requests.exceptions import ConnectTimeout, ProxyError
    from urllib3.exceptions import NewConnectionError

    return isinstance(error, ConnectTimeout | ProxyError) or any(
        isinstance(cause, NewConnectionError) for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, outermost first."""
    cause: Any = error
    while isinstance(cause, BaseException):
        yield cause
        wrapped = (getattr(cause, "reason", None), *cause.args, cause.__cause__)
        cause = next((each for each in wrapped if isinstance(each, BaseException)), None)


def _innermost(error: BaseException) -> str:
    """Return the text of the innermost cause."""
    *_, cause = _causes(error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return str(text).rpartition(">: ")[2]  # urllib3 puts its objects before some
