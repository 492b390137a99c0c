"""What is done by hand for S3's requests that come by the thousand: signatures and listings."""

from __future__ import annotations

import datetime

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.parsers import ResponseParserError

from det_core.storage._objects._s3_direct import _host_and_path
from det_core.storage._objects._s3_errors import is_passing
from det_core.storage._objects._s3_listing import query_of, read_page
from det_core.storage._objects._s3_signature import signed

NOW = 1_790_000_000.0
KEYS = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
PASSING_KEYS = Credentials("ASIAEXAMPLE", "another secret", "a token/of+some=length")


@pytest.mark.parametrize("who", [KEYS, PASSING_KEYS])
@pytest.mark.parametrize(
    ("method", "host", "path", "query", "headers"),
    [
        ("PUT", "127.0.0.1:7480", "/bucket/a/b%20c/%C3%A4~.bin", "", {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}),
        ("GET", "bucket.s3.eu-west-1.amazonaws.com", "/key", "", {"Range": "bytes=0-9", "X-Odd": "  two   blanks "}),
        ("PUT", "[::1]:9000", "/b/large", "partNumber=12&uploadId=2~abc%2F%3D", {}),
        ("GET", "localhost", "/b/", query_of("some/prefix ä+&=", "1/x+y=="), {}),
        ("GET", "localhost", "/b/", "uploads", {}),
    ],
)
def test_the_signature_is_botocores(
    monkeypatch: pytest.MonkeyPatch,
    who: Credentials,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: dict[str, str],
) -> None:
    moment = datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)
    monkeypatch.setattr(auth, "get_current_datetime", lambda: moment)
    request = AWSRequest(method, f"http://{host}{path}" + (f"?{query}" if query else ""), headers)
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    auth.S3SigV4Auth(who, "s3", "eu-west-1").add_auth(request)
    assert signed(method, host, path, query, headers, who, "eu-west-1", NOW) == dict(request.headers.items())


@pytest.mark.parametrize(
    ("base", "host", "path"),
    [
        ("http://127.0.0.1:80/b/", "127.0.0.1", "/b/"),
        ("https://[::1]:9000/b/", "[::1]:9000", "/b/"),
        ("https://B.s3.amazonaws.com/", "b.s3.amazonaws.com", "/"),
        ("http://localhost:443/a%20b/c/", "localhost:443", "/a%20b/c/"),
    ],
)
def test_the_host_is_what_is_sent(base: str, host: str, path: str) -> None:
    assert _host_and_path(base) == (host, path)


PAGE = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult{space}><Name>b</Name><IsTruncated>{more}</IsTruncated>{token}{encoding}
<Contents><Key>{key}</Key><LastModified>{date}</LastModified><Size>5368709120</Size></Contents>
</ListBucketResult>"""
SPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
DATE = "2026-11-21T16:05:08.250Z"


def page_of(
    key: str = "k", space: str = SPACE, more: str = "false", token: str = "", encoding: str = "", date: str = DATE
) -> bytes:
    """An answer of a server."""
    return PAGE.format(key=key, space=space, more=more, token=token, encoding=encoding, date=date).encode()


@pytest.mark.parametrize("space", [SPACE, ""])
def test_a_page_is_read(space: str) -> None:
    page = read_page(page_of(space=space))
    assert [(e.key, e.size) for e in page.entries] == [("k", 5 << 30)] and page.next is None
    assert (
        page.entries[0].modified == datetime.datetime(2026, 11, 21, 16, 5, 8, 250000, datetime.timezone.utc).timestamp()
    )


def test_keys_are_unquoted_only_if_the_server_says_that_it_quoted_them() -> None:
    quoted = read_page(page_of(key="a+b%2Bc/%C3%A4%26", encoding="<EncodingType>url</EncodingType>"))
    plain = read_page(page_of(key="a+b%2Bc/ä&amp;"))
    assert (quoted.entries[0].key, plain.entries[0].key) == ("a b+c/ä&", "a+b%2Bc/ä&")


@pytest.mark.parametrize("date", ["2026-11-21T16:05:08Z", "2026-11-21T16:05:08+00:00", "Sat, 21 Nov 2026 16:05:08 GMT"])
def test_dates_of_other_servers(date: str) -> None:
    moment = datetime.datetime(2026, 11, 21, 16, 5, 8, tzinfo=datetime.timezone.utc)
    assert read_page(page_of(date=date)).entries[0].modified == moment.timestamp()


def test_there_is_a_next_page_only_if_the_server_says_so() -> None:
    token = "<NextContinuationToken>t</NextContinuationToken>"
    assert read_page(page_of(more="true", token=token)).next == "t"
    assert read_page(page_of(more="false", token=token)).next is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>a proxy</html>",
        page_of()[:-30],
        page_of(more="true"),
        page_of(date="once"),
        page_of().replace(b"Size", b"Length"),
    ],
)
def test_what_is_no_listing_is_never_taken_for_a_short_one(body: bytes) -> None:
    with pytest.raises(ResponseParserError, match="is no listing of a bucket") as caught:
        read_page(body)
    assert is_passing(caught.value)
