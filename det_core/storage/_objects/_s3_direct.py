"""The data requests of S3, signed by botocore and sent by aiobotocore's HTTP session, without what lies between.

A call of the client is built from a model of the service, validated, resolved to an endpoint, run past some twenty
hooks and parsed: 1 ms of Python for what a server stores in half of that. A PUT or GET of one object needs none of
it. What is out of the ordinary (redirects, directory buckets, access points) is left to the client.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit
from xml.etree import ElementTree

from aiobotocore.httpsession import AIOHTTPSession
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError
from botocore.utils import get_environ_proxies

from det_core.storage._objects._body import Body

MARK = "det_core-key"
SAFE = "/-_.~"
OF_ANOTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")


class Redirected(Exception):
    """The server wants the request elsewhere: the client knows how."""


class Answer(NamedTuple):
    """What came back."""

    headers: dict[str, str]
    """By name in small letters."""
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
        self._base, self._region, self._credentials, self._config = base, region, credentials, config
        self._http = AIOHTTPSession(
            verify=verify or True,
            proxies=get_environ_proxies(base),
            timeout=(config.connect_timeout, config.read_timeout),
            max_pool_connections=config.max_pool_connections,
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
        self = cls(address[: -len(MARK)], region, credentials, client.meta.config, verify)
        await self._http.__aenter__()
        return self

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
        return (await self._send(operation, "PUT", key, headers, Body(data) if data else b"", query)).headers["etag"]

    async def get(self, key: str, headers: dict[str, str]) -> bytes:
        """Bytes of an object.

        Raises:
            ClientError: the server refused.
            Redirected: the client is to be asked.
        """
        return (await self._send("GetObject", "GET", key, headers)).body

    async def _send(
        self, operation: str, method: str, key: str, headers: dict[str, str], data: Any = None, query: str = ""
    ) -> Answer:
        url = self._base + quote(key, safe=SAFE) + (f"?{query}" if query else "")
        request = AWSRequest(method, url, headers, data)
        if self._credentials is not None:
            request.context["client_config"] = self._config
            who = await self._credentials.get_frozen_credentials()
            S3SigV4Auth(who, "s3", self._region).add_auth(request)
        response = await self._http.send(request.prepare())
        body = await response.content
        if response.status_code < 300:
            return Answer(response.headers, body)
        error = _refused(response.status_code, response.headers, body, operation)
        followed = urlsplit(response.url).netloc != urlsplit(url).netloc  # where the signature is not valid
        if response.status_code < 400 or followed or error.response["Error"]["Code"] in OF_ANOTHER_REGION:
            raise Redirected(url) from error
        raise error


def _refused(status: int, headers: Any, body: bytes, operation: str) -> ClientError:
    """The error that the client would raise."""
    said = {"Code": str(status), "Message": ""}
    try:
        said.update({e.tag.rpartition("}")[2]: e.text or "" for e in ElementTree.fromstring(body)})
    except ElementTree.ParseError:
        said["Message"] = body[:200].decode(errors="replace")
    about = {"HTTPStatusCode": status, "HTTPHeaders": dict(headers)}
    return ClientError({"Error": said, "ResponseMetadata": about}, operation)
