"""The door to a master: its requests and answers, and nothing of what they mean."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import responses
from random import SystemRandom
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from det_core.client._address import Address
from det_core.client._http import Answer, Failed, Http, NotSent
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster

TIMEOUT = 60.0
"""Seconds without a byte after which a request has failed."""
ATTEMPTS = 4
"""How often a request is sent if connections fail."""
FIRST_PAUSE = 0.2
"""Seconds before the second attempt; twice as many before each one after it."""
_BUSY = (502, 503, 504)


class Master:
    """A session with a master.

    Args:
        address: where it is, and who asks.
        timeout: seconds without a byte after which a request has failed.
        attempts: how often a request is sent if connections fail.
    """

    def __init__(self, address: Address, *, timeout: float = TIMEOUT, attempts: int = ATTEMPTS) -> None:
        self.address = address
        self._timeout = timeout
        self._attempts = attempts
        self._http = Http(address.url, address.certificate)

    def __repr__(self) -> str:
        return f"Master({self.url!r})"

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Its address."""
        return self.address.url

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def get(self, path: str, *, wait: float = 0.0, **query: Any) -> Any:
        """Ask for something; see :meth:`request`."""
        return self.request("GET", path, query, wait=wait)

    def post(self, path: str, body: Any = None, *, once: bool = False) -> Any:
        """Have something done; see :meth:`request`."""
        return self.request("POST", path, body=body, once=once)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        body: Any = None,
        wait: float = 0.0,
        once: bool = False,
    ) -> Any:
        """Send a request, again if the connection fails, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: below ``/api/v1/``.
            query: parameters; those that are None are left out.
            body: what is sent as JSON; None: nothing.
            wait: seconds that the master may take to answer, besides the usual.
            once: not again if it may have arrived, because twice would be wrong.

        Raises:
            MasterUnreachable: no master answers there.
            MasterDenied: it wants another token.
            UnknownToMaster: it knows no such object.
            MasterError: any other refusal or failure.
        """
        data = None if body is None else orjson.dumps(body)
        pause = FIRST_PAUSE
        for left in range(self._attempts - 1, -1, -1):
            try:
                with self._http.answer(
                    method, _target(path, query), data, self._headers(data), self._timeout + wait
                ) as a:
                    text = a.response.read()
            except NotSent as e:
                if not left or _final(e.__cause__):
                    raise self._unreachable(e.__cause__) from e.__cause__
            except Failed as e:
                if not left or once:
                    raise self._unreachable(e, once) from e
            else:
                if not left or a.status not in _BUSY:
                    return self._told(path, a.status, text)
            time.sleep(pause * SystemRandom().uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError("the last attempt has returned or raised")

    @contextmanager
    def lines(self, path: str, query: Mapping[str, Any] | None = None, *, wait: float = 0.0) -> Iterator[Iterator[Any]]:
        """The answer to a question that is a stream: what stands under ``result`` in each of its lines.

        Args:
            path: as for :meth:`request`.
            query: as for :meth:`request`.
            wait: seconds that may pass between lines, besides the usual; ``inf``: any number.

        Raises:
            MasterError: as :meth:`request` does, at the start and between lines.
        """
        timeout = None if wait == float("inf") else self._timeout + wait
        try:
            with self._http.answer("GET", _target(path, query), None, self._headers(None), timeout) as a:
                if a.status >= 300:
                    self._told(path, a.status, a.response.read())
                yield _results(path, a)
        except NotSent as e:
            raise self._unreachable(e.__cause__) from e.__cause__
        except Failed as e:
            if isinstance(e, MasterError):
                raise
            raise self._unreachable(e) from e

    def _headers(self, data: bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self.address.token:
            headers["Authorization"] = f"Bearer {self.address.token}"
        return headers

    def _told(self, path: str, status: int, text: bytes) -> Any:
        try:
            told = orjson.loads(text) if text else {}
        except orjson.JSONDecodeError as e:
            raise MasterError(
                f"{self.url} answers {path} ({status}) with something that is no JSON: is a master there?",
                status,
            ) from e
        if status < 300:
            return told
        error = _refusal(path, status, told)
        if status != 401:
            raise error
        hint = "it is a wrong one" if self.address.token else "there is none"
        raise MasterDenied(
            f"the master at {self.url} wants its user's token, and {hint}: set DET_USER_TOKEN to the content of the "
            "file master/token in its home folder",
            401,
        )

    def _unreachable(self, e: BaseException | None, once: bool = False) -> MasterUnreachable:
        perhaps = "; whether the request has arrived is not known" if once else ""
        source = f" ({self.address.source})" if self.address.source else ""
        return MasterUnreachable(f"no master answers at {self.url}{source}: {_why(e)}{perhaps}")


def _results(path: str, answer: Answer) -> Iterator[Any]:
    for line in answer.response:
        if line.strip():
            told = orjson.loads(line)
            if isinstance(told, dict) and "error" in told:
                raise _refusal(path, 500, told)
            yield told.get("result", told) if isinstance(told, dict) else told


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    given = {k: v for k, v in (query or {}).items() if v is not None}
    plain = {k: str(v).lower() if isinstance(v, bool) else v for k, v in given.items()}
    asked = f"?{urlencode(plain, doseq=True)}" if plain else ""
    return f"/api/v1/{quote(path)}{asked}"


def _final(e: BaseException | None) -> bool:
    """Whether trying again is of no use: certificates, names; but a master that starts refuses for a moment."""
    import socket
    import ssl

    return isinstance(e, ssl.SSLError | socket.gaierror)


def _why(e: BaseException | None) -> str:
    if isinstance(e, TimeoutError):
        return "no answer in time"
    if isinstance(e, OSError) and e.strerror:
        return e.strerror.lower()
    return str(e) or type(e).__name__


def _refusal(path: str, status: int, told: Any) -> MasterError:
    """The error for an answer, from its body (§2.2)."""
    body = told.get("error") if isinstance(told, dict) else None
    text = body.get("error") if isinstance(body, dict) else None
    if text is None and isinstance(told, dict):
        text = told.get("message") or told.get("detail")
    text = str(text) if text else f"the master answers {path} with {status} {responses.get(status, '')}".rstrip()
    kind = {401: MasterDenied, 403: MasterDenied, 404: UnknownToMaster}.get(status, MasterError)
    return kind(text, status)
