"""What goes wrong with S3, in one line that says what to do."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, NamedTuple

from det_core.errors import StorageError


class Meaning(NamedTuple):
    """What an error code stands for."""

    errno: int
    text: str


DENIED = "the key may not do this: ask for a policy that allows s3:{action} on {bucket}"
MEANINGS = {
    "InvalidAccessKeyId": Meaning(errno.EACCES, "the server does not know the access key id: correct access_key"),
    "SignatureDoesNotMatch": Meaning(errno.EACCES, "the secret key is wrong: correct secret_key"),
    "AccessDenied": Meaning(errno.EACCES, DENIED),
    "AllAccessDisabled": Meaning(errno.EACCES, DENIED),
    "AccountProblem": Meaning(errno.EACCES, "the account is suspended: ask who runs the store"),
    "UserSuspended": Meaning(errno.EACCES, "the account is suspended: ask who runs the store"),
    "ExpiredToken": Meaning(errno.EACCES, "the session token has expired: get new temporary keys"),
    "TokenRefreshRequired": Meaning(errno.EACCES, "the session token has expired: get new temporary keys"),
    "InvalidToken": Meaning(errno.EACCES, "the session token is wrong: get new temporary keys"),
    "RequestTimeTooSkewed": Meaning(
        errno.EACCES, "this machine's clock differs from the server's by more than 15 minutes: set it (timedatectl)"
    ),
    "RequestExpired": Meaning(
        errno.EACCES, "this machine's clock differs from the server's by more than 15 minutes: set it (timedatectl)"
    ),
    "NoSuchBucket": Meaning(errno.ENOENT, "there is no bucket {bucket}: make it, or correct its name"),
    "NoSuchKey": Meaning(errno.ENOENT, "the object is not there"),
    "NoSuchUpload": Meaning(errno.ENOENT, "its parts are gone: they were given up or collected by somebody else"),
    "InvalidBucketName": Meaning(errno.EINVAL, "{bucket} cannot be the name of a bucket: correct it"),
    "AuthorizationHeaderMalformed": Meaning(errno.EINVAL, "the bucket is in another region: set its region"),
    "PermanentRedirect": Meaning(errno.EINVAL, "the bucket is at another address: set its region or endpoint_url"),
    "QuotaExceeded": Meaning(errno.EDQUOT, "the quota is used up: delete checkpoints, or ask for more"),
    "InsufficientCapacity": Meaning(errno.ENOSPC, "the store is full: delete checkpoints"),
    "XMinioStorageFull": Meaning(errno.ENOSPC, "the store is full: delete checkpoints"),
    "EntityTooLarge": Meaning(errno.EFBIG, "the store takes no object of that size"),
    "BadDigest": Meaning(errno.EIO, "the bytes were damaged on their way"),
    "SlowDown": Meaning(errno.EAGAIN, "the server is overloaded and asks to slow down: try again later"),
}
STATUSES = {
    401: Meaning(errno.EACCES, "the server wants other credentials: correct access_key and secret_key"),
    403: MEANINGS["AccessDenied"],
    404: Meaning(errno.ENOENT, "the server knows no such thing: is endpoint_url the address of an S3 server?"),
    405: Meaning(errno.EINVAL, "the server cannot do that: is endpoint_url the address of an S3 server?"),
    429: MEANINGS["SlowDown"],
    503: MEANINGS["SlowDown"],
    507: MEANINGS["InsufficientCapacity"],
}
PASSING = {
    "BadDigest", "BandwidthLimitExceeded", "ConcurrentModification", "IncompleteBody", "InternalError",
    "LimitExceededException", "OperationAborted", "RequestLimitExceeded", "RequestThrottled", "RequestTimeout",
    "RequestTimeoutException", "ServiceUnavailable", "SlowDown", "Throttled", "Throttling", "ThrottlingException",
    "TooManyRequests", "TooManyRequestsException",
}  # fmt: skip
ACTIONS = {
    "PutObject": "PutObject",
    "UploadPart": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "AbortMultipartUpload": "AbortMultipartUpload",
    "GetObject": "GetObject",
    "DeleteObjects": "DeleteObject",
    "ListObjectsV2": "ListBucket",
    "ListMultipartUploads": "ListBucketMultipartUploads",
}
NO_KEYS = (
    "there are no credentials: give access_key and secret_key, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "name an AWS profile"
)


def code_of(error: BaseException) -> str:
    """The server's word for what went wrong; empty if it said none."""
    return str(_response(error).get("Error", {}).get("Code") or "")


def _response(error: BaseException) -> dict[str, Any]:
    found = getattr(error, "response", None)
    return found if isinstance(found, dict) else {}


def _status(error: BaseException) -> int:
    found = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found if isinstance(found, int) else int(code_of(error)) if code_of(error).isdigit() else 0


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment."""
    if _response(error):
        # A server that is just starting, or a proxy before it, may answer anything with 5xx.
        return code_of(error) in PASSING or _status(error) in (408, 429) or 500 <= _status(error) not in (501, 507)
    return _is_of_the_network(error)


def _is_of_the_network(error: BaseException) -> bool:
    from aiohttp import ClientError, ClientSSLError, InvalidURL
    from botocore.exceptions import (
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        InvalidProxiesConfigError,
        SSLError,
    )
    from botocore.parsers import ResponseParserError

    if isinstance(error, InvalidURL | InvalidProxiesConfigError | SSLError | ClientSSLError):
        return False
    network = (ClientError, ConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError)
    return isinstance(error, (*network, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError))


def retry_after(error: BaseException) -> float | None:
    """The seconds after which the server wants to be asked again; None if it did not say."""
    headers = _response(error).get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return float(headers["retry-after"])
    except (KeyError, TypeError, ValueError):
        return None


def explain(
    url: str, bucket: str, endpoint: str | None, operation: str, key: str, error: BaseException
) -> StorageError:
    """The error for a call that is given up.

    Args:
        url: the store, as messages name it.
        bucket: its bucket.
        endpoint: the server, if it is not AWS.
        operation: what was tried.
        key: on which object.
        error: what the client library raised.
    """
    meaning = _meaning(error, bucket, endpoint)
    return StorageError(meaning.errno, f"checkpoint store {url}: cannot {operation} {key or '/'}: {meaning.text}")


def _meaning(error: BaseException, bucket: str, endpoint: str | None) -> Meaning:
    server = endpoint or "S3"
    if _response(error):
        code, status = code_of(error), _status(error)
        action = ACTIONS.get(getattr(error, "operation_name", ""), "")
        found = MEANINGS.get(code) or (MEANINGS["SlowDown"] if code in PASSING and status in (429, 503) else None)
        found = found or STATUSES.get(status) or Meaning(errno.EIO, "the server refused")
        said = _response(error).get("Error", {}).get("Message")
        detail = f"{code or status}: {said}" if said and said != "None" else str(code or status)
        return Meaning(found.errno, f"{found.text.format(bucket=bucket, action=action or '*')} ({detail})")
    return _without_answer(error, server)


def _without_answer(error: BaseException, server: str) -> Meaning:
    import aiohttp
    from botocore import exceptions

    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return Meaning(errno.EACCES, NO_KEYS)
    if isinstance(error, exceptions.CredentialRetrievalError | exceptions.TokenRetrievalError):
        return Meaning(errno.EACCES, f"no credentials could be fetched: {error}")
    if isinstance(error, exceptions.ProfileNotFound):
        return Meaning(errno.EINVAL, f"{error}: correct AWS_PROFILE or the AWS configuration files")
    if isinstance(error, exceptions.SSLError | aiohttp.ClientSSLError):
        return Meaning(errno.EACCES, f"{server} has no certificate that is trusted here: {error}")
    if isinstance(error, exceptions.EndpointConnectionError | aiohttp.ClientConnectorError):
        return Meaning(errno.EHOSTUNREACH, f"{server} cannot be reached: is the address right, is the server up?")
    if isinstance(error, asyncio.TimeoutError | TimeoutError | exceptions.ReadTimeoutError):
        return Meaning(errno.ETIMEDOUT, f"{server} did not answer in time: {error or 'timed out'}")
    if isinstance(error, ConnectionRefusedError):
        return Meaning(errno.ECONNREFUSED, f"{server} cannot be reached: is the address right, is the server up?")
    if _is_of_the_network(error):
        cause = getattr(error, "kwargs", {}).get("error") or error
        return Meaning(errno.ECONNRESET, f"the connection to {server} failed: {type(cause).__name__}: {cause}")
    return Meaning(errno.EIO, f"{type(error).__name__}: {error}")
