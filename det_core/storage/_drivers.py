"""File systems of fsspec as object stores: what each service wants said, and what only one can do.

s3fs, gcsfs, adlfs and the others do requests, multipart, retries and credentials. All calls here block, no longer than
their deadline; as many threads as ``Driver.threads`` may make them at a time.
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
DEFAULT_TRIES, PROBE_TRIES = 8, 3
"""Tries of a request; those of a probe take a few seconds, the others, with those of s3fs around them, a minute."""
S3FS_RETRIES = 12
CALL_TIMEOUT = 120.0
"""Seconds for a call over all its tries, beside those for its bytes."""
SILENT_TIMEOUT = 10.0
"""The same after a call that had no answer, until one has: what is still to be tidied up is not worth minutes."""
PROBE_TIMEOUT = 15.0
"""Seconds for all calls of a probing driver together."""
MIN_BYTES_PER_SECOND = 32 << 10
"""A transfer that is slower counts as stalled, as bytes that trickle keep every timeout of a socket from firing."""
CLOSE_TIMEOUT = 1.0
"""Seconds that connections may take to close."""
AZURE = ("az", "abfs", "abfss")
MODIFIED = ("LastModified", "last_modified", "modified", "mtime", "updated", "created")
SECRET = ("key", "secret", "token", "password", "passphrase", "credential", "connection_string", "sas", "pkey")
"""An option whose name holds one of these is shown to nobody."""


class Driver:
    """A place in a file system. Keys are paths below it.

    Args:
        url: the store, as messages name it: without secrets.
        base: its path in the file system.
        make: makes the file system, at the first use; is given the number of tries of a request.
        secrets: texts that no message shows.
        threads: how many calls are worth having in flight; 1 for a file system that threads must not share, as those
            on ftplib and paramiko.
        put_options: for ``put_file``.
        omitted: options that are not known here, as they are secrets; errors name them.
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
        self.url, self._base, self._make, self._tries = url, base.rstrip("/"), make, tries
        self._secrets, self.threads, self._put_options = [s for s in secrets if s], threads, dict(put_options)
        self._protocol = url.partition("://")[0]
        self._warned_unlisted = omitted
        self._calls = Calls()
        self._until: float | None = None
        """When the last call is to be over, on the monotonic clock."""

    def with_few_tries(self) -> Driver:
        """The same place by a connection that gives up early, for a person who waits."""
        options: dict[str, Any] = {
            "secrets": self._secrets, "threads": self.threads, "put_options": self._put_options,
            "omitted": self._warned_unlisted,
        }  # fmt: skip
        with_few_tries = Driver(self.url, self._base, self._make, **options, tries=PROBE_TRIES)
        with_few_tries._until = _clock.monotonic() + PROBE_TIMEOUT
        return with_few_tries

    def limit(self, deadline: Callable[[], float | None]) -> None:
        """Let no call last longer than until ``deadline()``, on the monotonic clock; None: there is no limit yet."""
        self._calls.deadline = deadline

    @property
    def is_out_of_time(self) -> bool:
        """Whether no call is made any more, as the process is to be gone."""
        return self._calls.is_out_of_time

    @cached_property
    def fs(self) -> Any:
        """The file system. Some look for credentials while they are made, over the network."""
        return self._calls.run(lambda: self._make(self._tries), None, self._time_for(0))

    def close(self) -> None:
        """Close the connections; a later call makes new ones.

        By themselves they would close with the file system, which lies in cycles of references until Python collects
        them. s3fs and gcsfs have no call for it. Other file systems close as they are let go.
        """
        fs = self.__dict__.pop("fs", None)
        session = getattr(fs, "_s3creator", None) or getattr(fs, "_session", None)  # there once one has connected
        if session is not None:
            exclude = partial(session.__aexit__, None, None, None)
            with contextlib.suppress(TimeoutError):  # a server that does not even answer to that
                self._calls.run(exclude, fs.loop, CLOSE_TIMEOUT, past_deadline=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self._make_folder(key)
        self._call("pipe_file", self._path(key), data, size=len(data))

    def put_file(self, source: str, key: str, on_progress: Callable[[int], None]) -> int:
        """Store a file; returns how many of its bytes ``on_progress`` was told. What that raises ends the transfer."""
        self._make_folder(key)
        callback = _callback(on_progress)
        try:
            self._put_file(source, key, callback)
        except FileNotFoundError:  # S3: the answer that its parts were put together was lost, and now they are gone
            on_progress(-callback.told)
            callback = _callback(on_progress)
            self._put_file(source, key, callback)
        return int(callback.told)

    def _put_file(self, source: str, key: str, callback: Any) -> None:
        size = os.path.getsize(source)
        if "chunksize" in self._put_options:  # the callback hears of each part, and one of s3fs has two on their way
            size = min(size, 2 * PART_BYTES)
        path, options = self._path(key), {**self._put_options, "callback": callback}
        self._call("put_file", source, path, size=size, since=lambda: callback.moved_at, **options)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of an object; a negative ``start`` counts from its end. Raises FileNotFoundError."""
        size = max(PART_BYTES, (end or 0) - (start or 0))
        # By itself s3fs asks for the size first, by a HEADER_BYTES, whose answer does not say why it is refused.
        options: dict[str, Any] = {"max_concurrency": 1} if self._protocol == "s3" else {}
        return bytes(self._call("cat_file", self._path(key), start=start, end=end, size=size, **options))

    def find(self, prefix: str) -> dict[str, tuple[int, float | None]]:
        """Every object in a folder: size, and when it was put (None: the service does not say).

        A key that ends in a slash is an empty object that stands for a folder. fsspec would show its own old picture.
        """
        self.fs.invalidate_cache()
        found = self._call("find", self._path(prefix.rstrip("/")), detail=True)
        return {self._key(path): (info.get("size") or 0, _modified(info)) for path, info in found.items()}

    def folders(self) -> list[str]:
        """The folders in the root. Raises FileNotFoundError where nothing was put yet."""
        self.fs.invalidate_cache()
        found = self._call("ls", self._base, detail=True)
        return [self._key(info["name"].rstrip("/")) for info in found if info["type"] == "directory"]

    def batches(self, keys: Collection[str]) -> list[list[str]]:
        """Keys, as many as one call removes; those that stand for a folder only where there are such objects."""
        size = 1000 if self._protocol == "s3" else 1
        every = [key for key in keys if not key.endswith("/") or self._protocol in ("s3", "gs")]
        return [every[i : i + size] for i in range(0, len(every), size)]

    def remove(self, keys: list[str]) -> None:
        """Remove one batch; what is not there is no error.

        Never by ``fs.rm``: it takes ``* ? [`` in names for globs, and removes other files. ``rm_file`` would drop the
        slash at the end of a key, and s3fs's own removal of many does not say which it could not remove.
        """
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
        while folder and not self.fs.async_impl:  # it may keep folders
            try:
                self._call("rmdir", self._path(folder))
            except Exception:  # each driver has its own error for one that is not empty: it stays
                return
            folder = folder.rpartition("/")[0]

    def abort_multipart_uploads(self, prefix: str) -> None:
        """Give up uploads below ``prefix`` that were never finished, as when the answer to their begin was lost.

        Only S3 keeps their parts, and they cost money. s3fs's ``clear_multipart_uploads`` would abort those of the
        whole bucket.
        """
        if self._protocol == "s3":
            bucket, key = self._object(prefix)
            found = self._call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in found.get("Uploads", ()):
                self._call("abort_mpu", bucket, upload["Key"], upload["UploadId"])

    def check_bucket(self) -> None:
        """Raise FileNotFoundError if the bucket does not exist. Services without buckets make what is missing."""
        bucket = self._base.partition("/")[0]
        if self._protocol == "s3":
            self._call("call_s3", "list_objects_v2", Bucket=bucket, MaxKeys=1)
        elif self._protocol == "gs":
            self._call("call", "GET", "b/{}/o", bucket, maxResults=1)
        elif self._protocol in AZURE:
            look = partial(_look_for_container, self.fs.service_client, bucket)
            self._calls.run(look, self.fs.loop, self._time_for(0))

    def problem_of(self, key: str) -> str | None:
        """Return why the library would put an object of this name under another one; None: it would not."""
        path = self._path(key)
        cut = {"s3": "?versionId=", **dict.fromkeys(AZURE, "?versionid=")}.get(self._protocol)
        if (cut is not None and cut in path) or self.fs._strip_protocol(path) != path:
            return f"{type(self.fs).__name__} would store it under another name: rename the file"
        return None

    def explain_error(self, error: BaseException) -> tuple[int, str]:
        """errno and one line, with what to do and without secrets."""
        cause = error.__cause__ or error  # of s3fs's errors the cause has the server's code, some have no more
        text = " ".join((str(cause) or type(cause).__name__).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if self._warned_unlisted:
            names = ", ".join(self._warned_unlisted)
            text += f" (the run's record leaves out the options {names}: name the storage with them)"
        for number, words, hint in HINTS:
            if any(word in f"{type(cause).__name__} {text}" for word in words):
                return number, f"{text}: {hint}"
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        return number, text

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}".rstrip("/")

    def _object(self, key: str) -> tuple[str, str]:
        """Bucket and whole name."""
        bucket, _, name = f"{self._base}/{key}".partition("/")
        return bucket, name

    def _key(self, path: str) -> str:
        return path[len(self._base) + 1 :] if path.startswith(self._base) else f"/{path}"[len(self._base) + 1 :]

    def _make_folder(self, key: str) -> None:
        """Not on asynchronous file systems, where there are no folders: s3fs would make a bucket, a misspelt one."""
        if not self.fs.async_impl:
            self._call("makedirs", self._path(key).rpartition("/")[0], exist_ok=True)

    def _call(
        self, name: str, *args: Any, size: int = 0, since: Callable[[], float] | None = None, **options: Any
    ) -> Any:
        """Call a method of the file system that moves ``size`` bytes, with a deadline."""
        fs, timeout = self.fs, self._time_for(size)
        if fs.async_impl:
            return self._calls.run(partial(getattr(fs, f"_{name}"), *args, **options), fs.loop, timeout, since)
        try:
            return self._calls.run(partial(getattr(fs, name), *args, **options), None, timeout, since)
        except TimeoutError:
            self.__dict__.pop("fs", None)  # the call that was left behind goes on with it, and no other may
            raise

    def _time_for(self, size: int) -> float:
        """Seconds that a call may take which moves so many bytes."""
        if self._until is not None:
            return max(0.0, self._until - _clock.monotonic())
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
"""What to do about errors: errno, words by which they are known, directory_advice. The first that fits counts."""


def s3(bucket: str, prefix: str = "", **settings: Any) -> Driver:
    """S3, and what speaks its protocol; raises MissingExtra without s3fs.

    s3fs's own defaults hold 10 parts of 50 MB for each file in memory.
    """
    s3fs = require("s3fs", extra="s3", purpose="a checkpoint store on S3")
    endpoint, region = settings.get("endpoint_url"), settings.get("region")

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
    options = {"chunksize": PART_BYTES, "max_concurrency": 2}
    return Driver(f"s3://{base}", base, make, secrets=secrets, threads=16, put_options=options)


S3_CONFIG = {
    "connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 40, "signature_version": "s3v4",
    "request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
}  # fmt: skip
"""botocore's own retries stay on: s3fs does not retry a connection that is refused. Every byte that comes back is
compared with the manifest's digests, so checksums and signed payloads would only cost time."""


def _delay_if_busy(response: Any = None, attempts: int = 1, **_: Any) -> float | None:
    """Return the seconds to the next try of a request that botocore would not try again; None: it decides."""
    if response is None or response[0].status_code not in (409, 429) or attempts >= DEFAULT_TRIES:
        return None
    return float(min(0.1 * 2**attempts, 10.0))


def gcs(bucket: str, prefix: str = "", endpoint_url: str | None = None, anonymous: bool | None = None) -> Driver:
    """Google Cloud Storage; raises MissingExtra without gcsfs.

    Not ``gcsfs.GCSFileSystem``, whose extended class asks Google's API for the bucket's layout first.
    """
    gcsfs = require("gcsfs.core", extra="gcs", purpose="a checkpoint store on Google Cloud Storage")
    anon = (endpoint_url or "").startswith("http://") if anonymous is None else anonymous
    options = {"token": "anon" if anon else None, "endpoint_url": endpoint_url, "consistency": "size"}
    base = f"{bucket}/{prefix}".rstrip("/")

    class Hasty(gcsfs.GCSFileSystem):  # type: ignore[misc, name-defined]
        """Tries a request three times in four seconds, instead of six times in half a minute."""

        _request = gcsfs.retry_request(retries=PROBE_TRIES)(gcsfs.GCSFileSystem._request.__wrapped__)

    def make(tries: int) -> Any:
        logging.getLogger("gcsfs").addFilter(_is_of_others)
        kind = gcsfs.GCSFileSystem if tries == DEFAULT_TRIES else Hasty
        return kind(**options, use_listings_cache=False, skip_instance_cache=True, loop=library_loop())

    return Driver(f"gs://{base}", base, make, threads=16, put_options={"chunksize": PART_BYTES})


def _is_of_others(_: logging.LogRecord) -> bool:
    """Return whether a record is of somebody else's call: what gcsfs logs of ours, with a traceback, is also raised."""
    return threading.current_thread().name != LOOP_THREAD


def azure(container: str, prefix: str = "", **settings: Any) -> Driver:
    """A container of Azure's blob storage; the environment (``AZURE_STORAGE_…``) says what is left out."""
    options: dict[str, Any] = {"connection_string": settings.get("connection_string")}
    if (url := settings.get("account_url")) is not None:
        host, credential = urlsplit(url).netloc, settings.get("credential")
        kind = "credential"
        if isinstance(credential, str):
            kind = "sas_token" if "sig=" in credential else "account_key"
        options = {"account_name": host.split(".")[0], "account_host": host, "anon": False, kind: credential}
    given = {name: value for name, value in options.items() if value is not None}
    return generic(f"az://{container}/{prefix}".rstrip("/"), given)


def generic(url: str, options: Mapping[str, Any] | None = None, omitted: Collection[str] = ()) -> Driver:
    """Whatever fsspec has a driver for.

    Args:
        url: the store.
        options: those of its file system.
        omitted: the names of options that a run's record does not keep; errors name them.

    Raises:
        ValueError: no driver has this protocol.
        MissingExtra: the driver's own package is not installed.
    """
    import fsspec

    protocol = url.partition("://")[0]
    if protocol in AZURE:
        require("adlfs", extra="azure", purpose="a checkpoint store on Azure")
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = ", ".join(sorted(name for name in fsspec.available_protocols() if name != "local"))
        raise ValueError(f"checkpoint_storage: nothing opens {protocol}://; fsspec knows {known}") from None
    except ImportError as e:
        package = (getattr(e.__cause__ or e.__context__ or e, "name", None) or protocol).split(".")[0]
        needs = f"a checkpoint store on {protocol}:// needs {package} ({e}). Install it: pip install {package}"
        raise MissingExtra(needs) from e
    found = {**kind._get_kwargs_from_urls(url), **(options or {})}
    secrets = [str(v) for k, v in found.items() if v and is_secret(k)]

    def make(_: int) -> Any:
        own_loop = {"loop": library_loop()} if kind.async_impl else {}
        return kind(**found, **own_loop, use_listings_cache=False, skip_instance_cache=True)

    base, threads = kind._strip_protocol(url), 16 if kind.async_impl else 1
    return Driver(without_secrets(url).rstrip("/"), base, make, secrets=secrets, threads=threads, omitted=omitted)


async def _look_for_container(service: Any, name: str) -> None:
    """List one blob of a container: adlfs takes one that it cannot ask about for one that is there."""
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
    """Return whether an option of this name is shown to nobody."""
    return any(word in option.lower() for word in SECRET)


def without_secrets(text: str) -> str:
    """A text; if it is a URL, without its user's name and password, its query and its fragment."""
    protocol, colon, rest = text.partition("://")
    if not colon:
        return text
    host, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, place = host.rpartition("@")
    return f"{protocol}://{place if ':' in user else host}{slash}{path}"


def _callback(on_progress: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Told(Callback):  # type: ignore[misc]
        told = 0
        moved_at = _clock.monotonic()

        def call(self, *_: Any, **__: Any) -> None:
            new, self.told = self.value - self.told, self.value
            if new > 0:
                self.moved_at = _clock.monotonic()
            on_progress(new)

    return Told()


def _modified(info: Mapping[str, Any]) -> float | None:
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
