"""Drivers: file systems of fsspec as object stores, with the options and workarounds that each service needs.

s3fs, gcsfs, adlfs and others implement requests, multipart, retries and credentials. All calls block, no longer than
their deadline; at most ``Driver.threads`` threads may make them at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from det_core import _clock
from det_core._optional import require
from det_core.errors import MissingExtra
from det_core.storage._calls import LOOP_THREAD, Calls, library_loop

PART_BYTES = 16 << 20
"""Bytes of a part of a multipart upload."""
DEFAULT_TRIES = 8
"""Tries of a request; with those of s3fs around them they take a minute."""
PROBE_TRIES = 3
"""Tries of a request while a person waits; they take a few seconds."""
S3FS_RETRIES = 12
"""Tries of s3fs around those of botocore."""
CALL_TIMEOUT = 120.0
"""Seconds for a call over all its tries, beside those for its bytes."""
SILENT_TIMEOUT = 10.0
"""The same after an unanswered call, until one is answered: cleaning up is not worth minutes."""
PROBE_TIMEOUT = 15.0
"""Seconds for all calls of a probe together."""
MIN_BYTES_PER_SECOND = 32 << 10
"""Rate below which a transfer counts as stalled: bytes that trickle in keep the timeouts of a socket from firing."""
CLOSE_TIMEOUT = 1.0
"""Maximum seconds for closing connections."""
AZURE = ("az", "abfs", "abfss")
"""Protocols of Azure."""
MODIFIED = ("LastModified", "last_modified", "modified", "mtime", "updated", "created")
"""Keys under which file systems give the time of a put."""
SECRET = ("key", "secret", "token", "password", "passphrase", "credential", "connection_string", "sas", "pkey")
"""Parts of the names of options that no message and no record may contain."""


class Driver:
    """A place in a file system. Keys are paths below it.

    Args:
        url: the store, as messages show it: without secrets.
        base: its path in the file system.
        make: creates the file system at the first use; receives the number of tries of a request.
        secrets: texts to hide in messages.
        threads: number of calls worth having in flight; 1 for a file system that is not thread-safe, such as those on
            ftplib and paramiko.
        put_options: options for ``put_file``.
        omitted: names of secret options that a run's record leaves out; errors list them.
        tries: number of tries of a request.
    """

    def __init__(
        self,
        url: str,
        base: str,
        make: Callable[[int], Any],
        *,
        secrets: Iterable[str] = (),
        threads: int = 1,
        put_options: Mapping[str, Any] = {},
        omitted: Collection[str] = (),
        tries: int = DEFAULT_TRIES,
    ) -> None:
        self.url = url
        self.threads = threads
        self._base = base.rstrip("/")
        self._make = make
        self._tries = tries
        self._secrets = [s for s in secrets if s]
        self._put_options = dict(put_options)
        self._protocol = url.partition("://")[0]
        self._warned_unlisted = omitted
        self._calls = Calls()
        self._deadline: float | None = None
        """Moment on the monotonic clock by which the last call must end."""

    def with_few_tries(self) -> Driver:
        """Return the same place with a connection that fails early, for a person who waits."""
        options: dict[str, Any] = {
            "secrets": self._secrets, "threads": self.threads, "put_options": self._put_options,
            "omitted": self._warned_unlisted,
        }  # fmt: skip
        driver = Driver(self.url, self._base, self._make, **options, tries=PROBE_TRIES)
        driver._deadline = _clock.monotonic() + PROBE_TIMEOUT
        return driver

    def limit(self, deadline: Callable[[], float | None]) -> None:
        """Let no call last beyond ``deadline()``, a moment on the monotonic clock, or None without a limit."""
        self._calls.deadline = deadline

    @property
    def is_out_of_time(self) -> bool:
        """Whether calls are no longer made, as the process must exit."""
        return self._calls.is_out_of_time

    @cached_property
    def fs(self) -> Any:
        """The file system. Some look for credentials over the network when they are created."""
        return self._calls.run(lambda: self._make(self._tries), None, self._time_for(0))

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        # Otherwise they close with the file system, which is in cycles of references until Python collects them. s3fs
        # and gcsfs have no method for it; other file systems close with their last reference.
        fs = self.__dict__.pop("fs", None)
        session = getattr(fs, "_s3creator", None) or getattr(fs, "_session", None)  # set by the first connection
        if session is not None:
            close = partial(session.__aexit__, None, None, None)
            with contextlib.suppress(TimeoutError):  # a server that does not answer to that either
                self._calls.run(close, fs.loop, CLOSE_TIMEOUT, past_deadline=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self._make_folder(key)
        self._call("pipe_file", self._path(key), data, size=len(data))

    def put_file(self, source: str, key: str, on_progress: Callable[[int], None]) -> int:
        """Store a file, and return how many of its bytes were reported to ``on_progress``, which may raise."""
        self._make_folder(key)
        callback = _callback(on_progress)
        try:
            self._put_file(source, key, callback)
        except FileNotFoundError:  # S3: the answer to "complete the upload" was lost, and its parts are gone now
            on_progress(-callback.reported)
            callback = _callback(on_progress)
            self._put_file(source, key, callback)
        return int(callback.reported)

    def _put_file(self, source: str, key: str, callback: Any) -> None:
        size = os.path.getsize(source)
        if "chunksize" in self._put_options:  # progress is reported for each part, of which s3fs sends two at a time
            size = min(size, 2 * PART_BYTES)
        path = self._path(key)
        options = {**self._put_options, "callback": callback}
        self._call("put_file", source, path, size=size, since=lambda: callback.moved_at, **options)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return bytes of an object; a negative ``start`` counts from its end.

        Raises:
            FileNotFoundError: If the object does not exist.
        """
        size = max(PART_BYTES, (end or 0) - (start or 0))
        options: dict[str, Any] = {}
        if self._protocol == "s3":  # otherwise s3fs asks for the size by a HEAD, whose answer has no cause of an error
            options["max_concurrency"] = 1
        return bytes(self._call("cat_file", self._path(key), start=start, end=end, size=size, **options))

    def find(self, prefix: str) -> dict[str, tuple[int, float | None]]:
        """Return every object in a directory: size, and time of the put, or None if the service does not tell.

        A key that ends in a slash is an empty object that represents a directory.
        """
        self.fs.invalidate_cache()  # fsspec would return an older listing
        found = self._call("find", self._path(prefix.rstrip("/")), detail=True)
        return {self._key(path): (info.get("size") or 0, _modified(info)) for path, info in found.items()}

    def folders(self) -> list[str]:
        """Return the directories in the root.

        Raises:
            FileNotFoundError: If nothing was put yet.
        """
        self.fs.invalidate_cache()
        found = self._call("ls", self._base, detail=True)
        return [self._key(info["name"].rstrip("/")) for info in found if info["type"] == "directory"]

    def batches(self, keys: Collection[str]) -> list[list[str]]:
        """Return keys in batches for :meth:`remove`; those of directories only if the service has such objects."""
        size = 1
        if self._protocol == "s3":  # the limit of its DeleteObjects
            size = 1000
        existing = [key for key in keys if not key.endswith("/") or self._protocol in ("s3", "gs")]
        return [existing[i : i + size] for i in range(0, len(existing), size)]

    def remove(self, keys: list[str]) -> None:
        """Remove one batch; missing objects are not an error."""
        # Not fs.rm(), which takes "* ? [" in names for globs and removes other files, nor rm_file() for a directory,
        # whose slash it drops, nor s3fs's removal of many, whose error does not name the objects that are left.
        bucket, key = self._object(keys[0])
        with contextlib.suppress(FileNotFoundError):
            if self._protocol == "s3" and (len(keys) > 1 or key.endswith("/")):
                objects = [{"Key": self._object(key)[1]} for key in keys]
                found = self._call(
                    "call_s3", "delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True}
                )
                for error in found.get("Errors", ()):
                    raise OSError(errno.EIO, " ".join(str(error.get(name)) for name in ("Code", "Message", "Key")))
            elif key.endswith("/"):
                self._call("call", "DELETE", "b/{}/o/{}", bucket, key)
            else:
                self._call("rm_file", self._path(keys[0]))
        folder = keys[0].rpartition("/")[0]
        while folder and not self.fs.async_impl:  # it may have directories
            try:
                self._call("rmdir", self._path(folder))
            except Exception:  # not empty; each driver has its own error for that
                return
            folder = folder.rpartition("/")[0]

    def abort_multipart_uploads(self, prefix: str) -> None:
        """Abort unfinished uploads below ``prefix``, such as one whose begin was not answered. Only S3 keeps their
        parts."""
        # They cost money. Not s3fs's clear_multipart_uploads(), which aborts those of the whole bucket.
        if self._protocol == "s3":
            bucket, key = self._object(prefix)
            found = self._call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in found.get("Uploads", ()):
                self._call("abort_mpu", bucket, upload["Key"], upload["UploadId"])

    def check_bucket(self) -> None:
        """Check that the bucket exists. Services without buckets create what is missing.

        Raises:
            FileNotFoundError: If it does not.
        """
        bucket = self._base.partition("/")[0]
        if self._protocol == "s3":
            self._call("call_s3", "list_objects_v2", Bucket=bucket, MaxKeys=1)
        elif self._protocol == "gs":
            self._call("call", "GET", "b/{}/o", bucket, maxResults=1)
        elif self._protocol in AZURE:
            check = partial(_check_container, self.fs.service_client, bucket)
            self._calls.run(check, self.fs.loop, self._time_for(0))

    def problem_of(self, key: str) -> str | None:
        """Return why the library would put an object of this name under another one, or None."""
        path = self._path(key)
        cut = {"s3": "?versionId=", **dict.fromkeys(AZURE, "?versionid=")}.get(self._protocol)
        if (cut is not None and cut in path) or self.fs._strip_protocol(path) != path:
            return f"{type(self.fs).__name__} would store it under another name: rename the file"
        return None

    def explain_error(self, error: BaseException) -> tuple[int, str]:
        """Return errno and one line with the remedy and without secrets."""
        cause = error.__cause__ or error  # the server's code is only in the cause of some of s3fs's errors
        text = " ".join((str(cause) or type(cause).__name__).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if self._warned_unlisted:
            names = ", ".join(self._warned_unlisted)
            text += f" (the run's record leaves out the options {names}: pass checkpoint_storage with them)"
        for number, words, hint in HINTS:
            if any(word in f"{type(cause).__name__} {text}" for word in words):
                return number, f"{text}: {hint}"
        if isinstance(error, OSError) and error.errno:
            return error.errno, text
        return errno.EIO, text

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}".rstrip("/")

    def _object(self, key: str) -> tuple[str, str]:
        """Return bucket and full name."""
        bucket, _, name = f"{self._base}/{key}".partition("/")
        return bucket, name

    def _key(self, path: str) -> str:
        if not path.startswith(self._base):  # some file systems drop the first slash
            path = f"/{path}"
        return path[len(self._base) + 1 :]

    def _make_folder(self, key: str) -> None:
        """Create the directory of a key, on file systems that have directories."""
        if not self.fs.async_impl:  # s3fs would create a bucket, such as a misspelt one
            self._call("makedirs", self._path(key).rpartition("/")[0], exist_ok=True)

    def _call(
        self, name: str, *args: Any, size: int = 0, since: Callable[[], float] | None = None, **options: Any
    ) -> Any:
        """Call a method of the file system that transfers ``size`` bytes, with a deadline."""
        fs = self.fs
        timeout = self._time_for(size)
        if fs.async_impl:
            return self._calls.run(partial(getattr(fs, f"_{name}"), *args, **options), fs.loop, timeout, since)
        try:
            return self._calls.run(partial(getattr(fs, name), *args, **options), None, timeout, since)
        except TimeoutError:
            self.__dict__.pop("fs", None)  # the abandoned call still uses it, and it is not thread-safe
            raise

    def _time_for(self, size: int) -> float:
        """Return the maximum duration in seconds of a call that transfers so many bytes."""
        if self._deadline is not None:
            return max(0.0, self._deadline - _clock.monotonic())
        timeout = SILENT_TIMEOUT if self._calls.is_silent else CALL_TIMEOUT
        return timeout + size / MIN_BYTES_PER_SECOND


HINTS = (
    (errno.ENOENT, ("NoSuchBucket", "ContainerNotFound", "FileNotFoundError"), "make the bucket, or correct its name"),
    (errno.EACCES, ("NoCredentials", "Unable to locate credentials"),
     "give access_key and secret_key, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    (errno.EACCES, ("SignatureDoesNotMatch",), "correct secret_key"),
    (errno.EACCES, ("InvalidAccessKeyId",), "correct access_key"),
    (errno.EACCES, ("ExpiredToken", "TokenRefreshRequired", "token has expired", "(400) when calling the Head"),
     "the temporary keys have expired: get new ones"),
    (errno.EACCES, ("RequestTimeTooSkewed", "RequestExpired"), "set this machine's clock (timedatectl)"),
    (errno.EACCES, ("AccessDenied", "orbidden", "PermissionError", "AuthorizationFailure", "AuthenticationFailed"),
     "use other keys, or ask for a policy that lets these get, put, list and delete objects"),
    (errno.EINVAL, ("AuthorizationHeaderMalformed", "PermanentRedirect"), "set the bucket's region or endpoint_url"),
    (errno.EDQUOT, ("QuotaExceeded",), "delete checkpoints, or ask for more room"),
    (errno.EAGAIN, ("SlowDown", "reduce your request rate", "ServiceUnavailable"), "the server is overloaded"),
    (errno.ETIMEDOUT, ("Timeout", "timed out"), "the server does not answer: is it the right address?"),
    (errno.EHOSTUNREACH, ("ConnectionError", "connect to", "ConnectError", "Cannot connect", "ServiceRequestError",
      "ConnectionRefused", "Connect call failed"),
     "is the address right, is the server up?"),
)  # fmt: skip
"""Remedies: errno, words that identify the error, advice. The first match counts."""


def s3(bucket: str, prefix: str = "", **settings: Any) -> Driver:
    """Return a driver for S3 and services with its protocol.

    Raises:
        MissingExtra: If s3fs is not installed.
    """
    s3fs = require("s3fs", extra="s3", purpose="a checkpoint store on S3")
    endpoint = settings.get("endpoint_url")
    region = settings.get("region")

    def make(tries: int) -> Any:
        from aiobotocore.session import AioSession

        session = AioSession()
        session.register("needs-retry.s3", _delay_if_busy)
        fs = s3fs.S3FileSystem(
            anon=settings.get("anonymous", False), key=settings.get("access_key"), secret=settings.get("secret_key"),
            token=settings.get("session_token"), endpoint_url=endpoint, cache_regions=not (endpoint or region),
            client_kwargs={"region_name": region} if region else {}, use_listings_cache=False,
            config_kwargs={**S3_CONFIG, "retries": {"mode": "standard", "max_attempts": tries}},
            skip_instance_cache=True, session=session, loop=library_loop(),
        )  # fmt: skip
        fs.retries = S3FS_RETRIES if tries == DEFAULT_TRIES else 1
        return fs

    base = f"{bucket}/{prefix}".rstrip("/")
    secrets = [settings.get(name) or "" for name in ("secret_key", "session_token")]
    # s3fs's defaults would hold 10 parts of 50 MB in memory for each file.
    options = {"chunksize": PART_BYTES, "max_concurrency": 2}
    return Driver(f"s3://{base}", base, make, secrets=secrets, threads=16, put_options=options)


S3_CONFIG = {
    "connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 40, "signature_version": "s3v4",
    "request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
}  # fmt: skip
"""Options of botocore. Its retries stay on, as s3fs does not retry a refused connection. Every byte that is read is
compared with the manifest's digests, so checksums and signed payloads would only cost time."""


def _delay_if_busy(response: Any = None, attempts: int = 1, **_: Any) -> float | None:
    """Return the seconds until the next try of a request that botocore would not retry, or None to let it decide."""
    if response is None or response[0].status_code not in (409, 429) or attempts >= DEFAULT_TRIES:
        return None
    return float(min(0.1 * 2**attempts, 10.0))


def gcs(bucket: str, prefix: str = "", endpoint_url: str | None = None, anonymous: bool | None = None) -> Driver:
    """Return a driver for Google Cloud Storage.

    Raises:
        MissingExtra: If gcsfs is not installed.
    """
    # Not gcsfs.GCSFileSystem, whose extended class first asks Google's API for the layout of the bucket.
    gcsfs = require("gcsfs.core", extra="gcs", purpose="a checkpoint store on Google Cloud Storage")
    if anonymous is None:  # an http:// endpoint is that of an emulator, without credentials
        anonymous = (endpoint_url or "").startswith("http://")
    options = {"token": "anon" if anonymous else None, "endpoint_url": endpoint_url, "consistency": "size"}
    base = f"{bucket}/{prefix}".rstrip("/")

    class ProbingFileSystem(gcsfs.GCSFileSystem):  # type: ignore[misc, name-defined]
        """File system that tries a request three times in four seconds, instead of six times in half a minute."""

        _request = gcsfs.retry_request(retries=PROBE_TRIES)(gcsfs.GCSFileSystem._request.__wrapped__)

    def make(tries: int) -> Any:
        logging.getLogger("gcsfs").addFilter(_is_of_others)
        kind = gcsfs.GCSFileSystem if tries == DEFAULT_TRIES else ProbingFileSystem
        return kind(**options, use_listings_cache=False, skip_instance_cache=True, loop=library_loop())

    return Driver(f"gs://{base}", base, make, threads=16, put_options={"chunksize": PART_BYTES})


def _is_of_others(_: logging.LogRecord) -> bool:
    """Return whether a log record is about a call of another user of gcsfs; errors of our calls are raised."""
    return threading.current_thread().name != LOOP_THREAD


def azure(container: str, prefix: str = "", **settings: Any) -> Driver:
    """Return a driver for a container of Azure Blob Storage; the environment (``AZURE_STORAGE_…``) provides what is not
    set.

    Raises:
        MissingExtra: If adlfs is not installed.
    """
    options: dict[str, Any] = {"connection_string": settings.get("connection_string")}
    if (url := settings.get("account_url")) is not None:
        host = urlsplit(url).netloc
        credential = settings.get("credential")
        kind = "credential"
        if isinstance(credential, str):
            kind = "sas_token" if "sig=" in credential else "account_key"
        options = {"account_name": host.split(".")[0], "account_host": host, "anon": False, kind: credential}
    options = {name: value for name, value in options.items() if value is not None}
    return generic(f"az://{container}/{prefix}".rstrip("/"), options)


def generic(url: str, options: Mapping[str, Any] | None = None, omitted: Collection[str] = ()) -> Driver:
    """Return a driver for any protocol of fsspec.

    Args:
        url: the store.
        options: options of its file system.
        omitted: names of options that a run's record leaves out; errors list them.

    Raises:
        ValueError: If no driver has this protocol.
        MissingExtra: If the driver's package is not installed.
    """
    import fsspec

    protocol = url.partition("://")[0]
    if protocol in AZURE:
        require("adlfs", extra="azure", purpose="a checkpoint store on Azure")
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = ", ".join(sorted(name for name in fsspec.available_protocols() if name != "local"))
        raise ValueError(f"checkpoint_storage: no driver for {protocol}://; fsspec knows {known}") from None
    except ImportError as e:
        package = (getattr(e.__cause__ or e.__context__ or e, "name", None) or protocol).split(".")[0]
        needs = f"a checkpoint store on {protocol}:// needs {package} ({e}). Install it: pip install {package}"
        raise MissingExtra(needs) from e
    arguments = {**kind._get_kwargs_from_urls(url), **(options or {})}
    secrets = [str(v) for k, v in arguments.items() if v and is_secret(k)]

    def make(_: int) -> Any:
        own_loop = {"loop": library_loop()} if kind.async_impl else {}
        return kind(**arguments, **own_loop, use_listings_cache=False, skip_instance_cache=True)

    base = kind._strip_protocol(url)
    threads = 16 if kind.async_impl else 1
    return Driver(without_secrets(url).rstrip("/"), base, make, secrets=secrets, threads=threads, omitted=omitted)


async def _check_container(service: Any, name: str) -> None:
    """List one blob of a container, or raise FileNotFoundError."""
    # adlfs takes a container that it may not ask about for one that exists.
    import asyncio

    async with service.get_container_client(name) as container:
        for tries in range(PROBE_TRIES, 0, -1):
            try:
                async for _ in container.list_blobs(results_per_page=1, retry_total=0):
                    return
                return
            except Exception as e:
                if getattr(e, "status_code", None) == 404:
                    raise FileNotFoundError(f"The container {name} does not exist") from e
                if tries == 1 or (getattr(e, "status_code", None) or 500) < 500:
                    raise
                await asyncio.sleep(1)


def is_secret(option: str) -> bool:
    """Return whether an option of this name is secret."""
    return any(word in option.lower() for word in SECRET)


def without_secrets(text: str) -> str:
    """Return the text; of a URL, without its user and password, query and fragment."""
    protocol, colon, rest = text.partition("://")
    if not colon:
        return text
    host, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, server = host.rpartition("@")
    if ":" in user:  # without a password it is not secret: abfs://container@account
        host = server
    return f"{protocol}://{host}{slash}{path}"


def _callback(on_progress: Callable[[int], None]) -> Any:
    """Return a callback of fsspec that reports progress."""
    from fsspec.callbacks import Callback

    class ProgressCallback(Callback):  # type: ignore[misc]
        reported = 0
        moved_at = _clock.monotonic()

        def call(self, *_: Any, **__: Any) -> None:
            new = self.value - self.reported
            self.reported = self.value
            if new > 0:
                self.moved_at = _clock.monotonic()
            on_progress(new)

    return ProgressCallback()


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return the time of the put of an object, or None if it is unknown."""
    for name in MODIFIED:
        found = info.get(name)
        if isinstance(found, str):
            with contextlib.suppress(ValueError):
                return _clock.parse_time(found)
        if isinstance(found, datetime.datetime):
            return found.timestamp()
        if isinstance(found, int | float):
            return float(found)
    return None
