"""Every S3 server there is: moto, and Ceph's gateway where it is installed."""

from __future__ import annotations

import pytest

from support.buckets import no_pause
from support.servers import S3Server

__all__ = ["no_pause"]


@pytest.fixture(params=["moto", "rgw"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Return each S3 server in turn."""
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server
