"""What goes wrong with Google Cloud Storage, in one line that says what to do."""

from __future__ import annotations

import asyncio
import errno
import json

from det_core.errors import StorageError


class Refused(Exception):
    """The server's answer to a request that it did not serve.

    Args:
        status: of the response; 0: it was served, but what arrived is not what was sent.
        text: what the server said.
        reason: its word for it ("rateLimitExceeded").
        retry_after: seconds after which it wants to be asked again.
        damaged: what arrived is not what was sent.
    """

    def __init__(
        self,
        status: int,
        text: str,
        reason: str = "",
        retry_after: float | None = None,
        damaged: bool = False,
    ) -> None:
        super().__init__(f"{status} {reason}: {text}" if status else text)
        self.status, self.text, self.reason = status, text, reason
        self.retry_after, self.damaged = retry_after, damaged

    @classmethod
    def of(cls, status: int, body: bytes, retry_after: str | None) -> Refused:
        """Read what the server said."""
        text, reason = body[:200].decode(errors="replace").strip(), ""
        try:
            error = json.loads(body)["error"]
            text = str(error["message"])
            reason = str(error["errors"][0]["reason"])
        except (ValueError, KeyError, IndexError, TypeError):
            reason = reason or ""
        seconds = float(retry_after) if retry_after and retry_after.replace(".", "", 1).isdigit() else None
        return cls(status, text, reason, seconds)

    @property
    def is_of_bucket(self) -> bool:
        """Whether it is the bucket that is not there."""
        return self.status == 404 and "bucket does not exist" in self.text.lower()


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment."""
    if isinstance(error, Refused):
        expired = error.status == 401 and "Invalid Credentials" in error.text
        throttled = error.reason in ("rateLimitExceeded", "userRateLimitExceeded", "backendError")
        return error.damaged or throttled or expired or error.status in (408, 429, 500, 502, 503, 504)
    return _is_of_the_network(error)


def _is_of_the_network(error: BaseException) -> bool:
    from aiohttp import ClientError, ClientSSLError, InvalidURL
    from google.auth.exceptions import TransportError

    if isinstance(error, InvalidURL | ClientSSLError):
        return False
    return isinstance(error, (ClientError, TransportError, OSError, asyncio.TimeoutError))


def explain(
    url: str, bucket: str, endpoint: str | None, operation: str, key: str, error: BaseException
) -> StorageError:
    """The error for a call that is given up.

    Args:
        url: the store, as messages name it.
        bucket: its bucket.
        endpoint: the server, if it is not Google's.
        operation: what was tried.
        key: on which object.
        error: what was raised.
    """
    number, text = _meaning(error, bucket, endpoint or "Google Cloud Storage")
    return StorageError(number, f"checkpoint store {url}: cannot {operation} {key or '/'}: {text}")


def _meaning(error: BaseException, bucket: str, server: str) -> tuple[int, str]:
    from aiohttp import ClientConnectorError, ClientSSLError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError

    if isinstance(error, Refused):
        return _refused(error, bucket)
    if isinstance(error, DefaultCredentialsError):
        return errno.EACCES, (
            "there are no credentials: set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, or run "
            "`gcloud auth application-default login`"
        )
    if isinstance(error, GoogleAuthError):
        return errno.EACCES, f"the credentials were refused: get new ones ({error})"
    if isinstance(error, ClientSSLError):
        return errno.EACCES, f"{server} has no certificate that is trusted here: {error}"
    if isinstance(error, ClientConnectorError):
        return errno.EHOSTUNREACH, f"{server} cannot be reached: is the address right, is the server up? ({error})"
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return errno.ETIMEDOUT, f"{server} did not answer in time: {error or 'timed out'}"
    if _is_of_the_network(error):
        return errno.ECONNRESET, f"the connection to {server} failed: {type(error).__name__}: {error}"
    return errno.EIO, f"{type(error).__name__}: {error}"


def _refused(error: Refused, bucket: str) -> tuple[int, str]:
    said = f"({error.status} {error.reason}: {error.text})"
    if error.damaged:
        return errno.EIO, error.text
    if error.is_of_bucket:
        return errno.ENOENT, f"there is no bucket {bucket}: make it, or correct its name {said}"
    if "skew" in error.text.lower() or "clock" in error.text.lower():
        return errno.EACCES, f"this machine's clock is off: set it (timedatectl) {said}"
    if error.status == 401:
        return errno.EACCES, f"the credentials are wrong or have expired: get new ones {said}"
    if error.status == 403 and "quota" in error.reason.lower():
        return errno.EDQUOT, f"the quota is used up: delete checkpoints, or ask for more {said}"
    if error.status == 429 or error.status == 503 or "ratelimit" in error.reason.lower():
        return errno.EAGAIN, f"the server is overloaded and asks to slow down: try again later {said}"
    if error.status == 403:
        return errno.EACCES, f"the account may not do this: give it Storage Object Admin on {bucket} {said}"
    if error.status == 404:
        return errno.ENOENT, f"the server knows no such thing {said}"
    return errno.EIO, f"the server refused {said}"
