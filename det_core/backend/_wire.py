"""Connections to one master: those of ``requests``, and what they lack.

That is a way to be interrupted, and TLS by the variables of the wire contract (§2.1).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from det_core.errors import MasterError

if TYPE_CHECKING:
    import ssl

    import requests

CONNECT = 10.0
"""Seconds to wait for a connection."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Answer(NamedTuple):
    """What the master answered."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class NoAnswer(Exception):
    """There was none, or only a part of one.

    Attributes:
        arrived: whether the master may have seen the request.
    """

    def __init__(self, reason: str, arrived: bool) -> None:
        super().__init__(reason)
        self.arrived = arrived


class Wire:
    """Sends requests, from any thread, over connections that stay open.

    Args:
        url: the master's address, with scheme and without a trailing slash.
        cert_file: a PEM file of certificates to trust beside those of the machine, or ``noverify``.
        cert_name: the name that the master's certificate is issued for, where it is not the host's.
    """

    def __init__(self, url: str, cert_file: str | None = None, cert_name: str | None = None) -> None:
        self.url = url
        self._cert_file, self._cert_name = cert_file, cert_name
        self._lock = threading.Lock()
        self._session: requests.Session | None = None
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interrupted = False

    def send(
        self,
        method: str,
        route: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        """Send one request, once.

        Args:
            method: of HTTP.
            route: the path below the master's address, with its leading slash.
            headers: what else is said.
            body: what is sent.
            params: the query; None values are left out.
            timeout: seconds without a byte after which there is no answer.

        Raises:
            NoAnswer: the connection failed.
            MasterError: it can never succeed, as TLS refuses the master's certificate.
        """
        import requests

        connect = min(CONNECT, timeout)
        try:
            with self._opened().request(
                method, self.url + route, params=params, data=body, headers=dict(headers), timeout=(connect, timeout),
                allow_redirects=False,
            ) as found:  # fmt: skip
                return Answer(found.status_code, found.reason or "", found.headers, found.content)
        except requests.exceptions.SSLError as e:
            if "CERTIFICATE" in str(e).upper():
                raise MasterError(_untrusted(self.url, e)) from e
            raise NoAnswer(_why(e), arrived=True) from e
        except (requests.exceptions.ConnectTimeout, requests.exceptions.ProxyError) as e:
            raise NoAnswer(_why(e), arrived=False) from e
        except requests.exceptions.RequestException as e:
            raise NoAnswer(_why(e), arrived="NewConnectionError" not in repr(e.args)) from e

    def interrupt(self) -> None:
        """Make every request that is under way fail, and those to come. Nothing else can follow but :meth:`close`."""
        import socket

        self._interrupted = True
        for connection in list(self._connections):
            if (sock := getattr(connection, "sock", None)) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()
        for connection in list(self._connections):  # a pool that an error still knows closes none by itself
            connection.close()

    def _check(self) -> None:
        """Raise once it was interrupted: asked before a request, and when a connection has just been made for one."""
        if self._interrupted:
            raise NoAnswer("the connection to the master is closed", arrived=False)

    def _opened(self) -> requests.Session:
        self._check()
        with self._lock:
            if self._session is None:
                self._session = self._open()
            return self._session

    def _open(self) -> requests.Session:
        from urllib.parse import urlsplit

        import requests

        session = requests.Session()
        session.auth = lambda request: request  # requests asks ~/.netrc otherwise, and overwrites the token
        host = urlsplit(self.url).hostname
        session.trust_env = host not in _LOOPBACK  # no proxy to the machine itself
        if self._cert_file == "noverify":
            session.verify = False
            warnings.filterwarnings("ignore", message=f"Unverified HTTPS request is being made to host '{host}'")
        adapter = _adapter(self._context(), self._cert_name, self._connections, self._check)
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        return session

    def _context(self) -> ssl.SSLContext | None:
        """What TLS trusts beside the certificates of ``requests``; None: nothing else."""
        if not self.url.startswith("https") or self._cert_file in (None, "", "noverify"):
            return None
        import ssl

        context = ssl.create_default_context()
        try:
            context.load_verify_locations(self._cert_file)
        except (OSError, ssl.SSLError) as e:
            raise MasterError(f"DET_MASTER_CERT_FILE={self._cert_file} holds no certificates: {e}") from e
        return context


def _adapter(
    context: ssl.SSLContext | None, name: str | None, connections: weakref.WeakSet[Any], check: Callable[[], None]
) -> Any:
    """What ``requests`` opens connections with: each is noted in ``connections``, and checked once it stands."""
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    class Plain(HTTPConnection):
        def connect(self) -> None:
            connections.add(self)
            super().connect()
            check()

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            connections.add(self)
            super().connect()
            check()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: Any) -> None:
            super().init_poolmanager(connections, maxsize, block, **kwargs, **tls)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
            manager = super().proxy_manager_for(proxy, **kwargs, **tls)
            manager.pool_classes_by_scheme = pools
            return manager

    pools = {"http": PlainPool, "https": SecurePool}
    tls: dict[str, Any] = {} if context is None else {"ssl_context": context}
    if name is not None:
        tls |= {"server_hostname": name, "assert_hostname": name}
    return Adapter()


def _why(error: Exception) -> str:
    """The innermost reason, in a few words."""
    inner: Any = error
    while True:
        cause = getattr(inner, "reason", None) or next((a for a in inner.args if isinstance(a, BaseException)), None)
        if not isinstance(cause, BaseException):
            break
        inner = cause
    text = str(inner) or type(inner).__name__
    return text.rpartition(">: ")[2] if ">: " in text else text


def _untrusted(url: str, error: Exception) -> str:
    return (
        f"the certificate of the master at {url} is not trusted ({_why(error)}): set DET_MASTER_CERT_FILE to the PEM "
        "file that signs it, and DET_MASTER_CERT_NAME to the name in it if that is not the host's"
    )
