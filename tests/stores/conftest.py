"""Every S3 server there is: moto, and Ceph's gateway where it is installed."""

from __future__ import annotations

import pytest

from support.servers import S3Server


@pytest.fixture(params=["moto", "rgw"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each S3 server in turn."""
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore makes its next try of a request at once; how many it makes is what it is."""
    from botocore.retries.standard import ExponentialBackoff

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0)
