"""The signature of a request to S3: AWS Signature Version 4, in the ``Authorization`` header, of all headers given.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html

botocore's own, which must be ready for everything that a request can be, takes 0.08 ms of Python: a fifth of what
ours takes for a small file with it. The payload is not signed, as in botocore's ``payload_signing_enabled: False``.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"


def signed(
    method: str, host: str, path: str, query: str, headers: Mapping[str, str], who: Any, region: str, now: float
) -> dict[str, str]:
    """The headers to send.

    Args:
        method: of HTTP.
        host: with the port, unless it is the scheme's own.
        path: quoted, as it is sent.
        query: the same; its values are quoted, too.
        headers: to be sent, without the host.
        who: has ``access_key``, ``secret_key`` and ``token``, which is None for keys that last.
        region: of the bucket.
        now: seconds since the epoch.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    sent = {**headers, "X-Amz-Date": moment, "X-Amz-Content-SHA256": UNSIGNED}
    if who.token:
        sent["X-Amz-Security-Token"] = who.token
    named = sorted([("host", host), *((name.lower(), " ".join(value.split())) for name, value in sent.items())])
    names = ";".join(name for name, _ in named)
    lines = "".join(f"{name}:{value}\n" for name, value in named)
    ordered = "&".join(sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&"))) if query else ""
    request = f"{method}\n{path}\n{ordered}\n{lines}\n{names}\n{UNSIGNED}"
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = f"{ALGORITHM}\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = hmac.digest(_key(who.secret_key, moment[:8], region), text.encode(), "sha256").hex()
    sent["Authorization"] = (
        f"{ALGORITHM} Credential={who.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent


@functools.lru_cache(maxsize=16)
def _key(secret: str, day: str, region: str) -> bytes:
    """What signs for a day."""
    key = f"AWS4{secret}".encode()
    for word in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, word.encode(), "sha256")
    return key
