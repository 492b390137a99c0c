"""The requests of S3 that come by the thousand, sent by aiohttp, without what lies between in its client.

A call of the client is built from a model of the service, validated, resolved to an endpoint, run past some twenty
hooks and parsed: 1 ms of Python for what a server stores in half of that. A PUT or GET of one object needs none of
it, nor does a listing. What is out of the ordinary (redirects, directory buckets, access points) is left to the client.
"""

from __future__ import annotations

import builtins
import ssl
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit
from xml.etree import ElementTree

import aiohttp
from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies
from yarl import URL

from det_core import _clock
from det_core.storage._objects._body import Body
from det_core.storage._objects._bucket import Entry
from det_core.storage._objects._s3_listing import query_of, read_page
from det_core.storage._objects._s3_signature import signed

MARK = "det_core-key"
SAFE = "/-_.~"
READ_BUFFER = 2 << 20
"""Bytes of a response that may lie unread before the socket is left alone: every stop costs a turn of the loop."""
OF_ANOTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")


class Redirected(Exception):
    """The server wants the request elsewhere: the client knows how."""


class Answer(NamedTuple):
    """What came back."""

    headers: Any
    """By name, in whatever letters."""
    body: bytes


class Direct:
    """One bucket's objects.

    Args:
        base: the URL of the bucket.
        region: for the signature.
        credentials: of aiobotocore; None: sign nothing.
        config: the client's.
        verify: the file of certificates to trust; None: botocore's.
    """

    def __init__(self, base: str, region: str, credentials: Any, config: Any, verify: str | None) -> None:
        self._base, self._region, self._credentials = base, region, credentials
        self._host, self._path = _host_and_path(base)
        https = base.startswith("https:")
        trusted = ssl.create_default_context(cafile=verify or get_cert_path(True)) if https else False
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.max_pool_connections, ssl=trusted),
            timeout=aiohttp.ClientTimeout(sock_connect=config.connect_timeout, sock_read=config.read_timeout),
            skip_auto_headers=("Content-Type", "User-Agent"),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            # Not trust_env: it has a thread look for ~/.netrc at every request.
            proxy=get_environ_proxies(base).get(base.partition(":")[0]),
        )

    @classmethod
    async def to(cls, client: Any, bucket: str, credentials: Any, verify: str | None) -> Direct | None:
        """What talks to a bucket as the client would; None if only the client can.

        Args:
            client: of aiobotocore, which is asked for the bucket's address.
            bucket: its name.
            credentials: as above.
            verify: as above.
        """
        url = await client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": MARK})
        address, _, query = url.partition("?")
        region = client.meta.region_name
        if credentials is not None:
            _, _, region, service, _ = parse_qs(query)["X-Amz-Credential"][0].rsplit("/", 4)
            if service != "s3":
                return None
        if bucket.startswith("arn:") or bucket.endswith("--x-s3") or not address.endswith("/" + MARK):
            return None
        return cls(address[: -len(MARK)], region, credentials, client.meta.config, verify)

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.close()

    async def put(self, operation: str, key: str, data: bytes | memoryview, headers: dict[str, str], query: str) -> str:
        """Send bytes; returns the ETag. Raises like :meth:`get`.

        Args:
            operation: S3's name for it.
            key: of the object.
            data: to send.
            headers: to send with it.
            query: of the URL.
        """
        answer = await self._send(operation, "PUT", key, headers, Body(data) if data else b"", query)
        return str(answer.headers["ETag"])

    async def get(self, key: str, headers: dict[str, str]) -> bytes:
        """Bytes of an object.

        Raises:
            ClientError: the server refused.
            Redirected: the client is to be asked.
        """
        return (await self._send("GetObject", "GET", key, headers)).body

    async def list(self, prefix: str) -> builtins.list[Entry]:
        """Every object under a prefix, by as many pages as the server makes of them.

        Raises:
            ClientError, Redirected: as :meth:`get` does.
            ResponseParserError: what came is no listing.
        """
        found: builtins.list[Entry] = []
        token: str | None = None
        while True:
            answer = await self._send("ListObjectsV2", "GET", "", {}, query=query_of(prefix, token))
            entries, token = read_page(answer.body)
            found += entries
            if token is None:
                return found

    async def _send(
        self, operation: str, method: str, key: str, headers: dict[str, str], data: Any = None, query: str = ""
    ) -> Answer:
        quoted = quote(key, safe=SAFE)
        url = self._base + quoted + (f"?{query}" if query else "")
        if self._credentials is not None:
            who = await self._credentials.get_frozen_credentials()
            path = self._path + quoted
            headers = signed(method, self._host, path, query, headers, who, self._region, _clock.now())
        sent = {**headers, "Accept-Encoding": "identity"}
        async with self._http.request(
            method, URL(url, encoded=True), headers=sent, data=data, allow_redirects=False
        ) as response:
            body = await response.read()
        if response.status < 300:
            return Answer(response.headers, body)
        error = _refused(response.status, response.headers, body, operation)
        if response.status < 400 or error.response["Error"]["Code"] in OF_ANOTHER_REGION:
            raise Redirected(url) from error
        raise error


def _host_and_path(base: str) -> tuple[str, str]:
    """Of a URL; the host as clients send it, without the port that its scheme has anyway."""
    parts = urlsplit(base)
    usual = {"http": ":80", "https": ":443"}[parts.scheme]
    return parts.netloc.rpartition("@")[2].lower().removesuffix(usual), parts.path


def _refused(status: int, headers: Any, body: bytes, operation: str) -> ClientError:
    """The error that the client would raise."""
    said = {"Code": str(status), "Message": ""}
    try:
        said.update({e.tag.rpartition("}")[2]: e.text or "" for e in ElementTree.fromstring(body)})
    except ElementTree.ParseError:
        said["Message"] = body[:200].decode(errors="replace")
    about = {"HTTPStatusCode": status, "HTTPHeaders": {name.lower(): value for name, value in headers.items()}}
    return ClientError({"Error": said, "ResponseMetadata": about}, operation)
