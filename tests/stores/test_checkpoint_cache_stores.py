"""Restoring by way of the cache, as in tests/fast/core on moto: from Ceph's gateway and from GCS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fast.core import test_checkpoint_cache_stores as short
from fast.core.test_checkpoint_cache_stores import (
    job,
    test_a_flipped_byte,
    test_a_whole_run,
    test_it_is_fetched_once_and_found_again,
    test_ranks_fetch_each_byte_once,
    test_what_others_wrote,
)
from support.servers import S3Server

__all__ = [
    "job",
    "test_a_flipped_byte",
    "test_a_whole_run",
    "test_it_is_fetched_once_and_found_again",
    "test_ranks_fetch_each_byte_once",
    "test_what_others_wrote",
]


@pytest.fixture(params=["rgw", "gcs"])
def storage(request: pytest.FixtureRequest) -> Any:
    """``checkpoint_storage`` for a place of this test alone."""
    server = request.getfixturevalue(f"{request.param}_server")
    if request.param == "rgw":
        return server.storage(server.make_bucket(), "some/prefix")
    return {"type": "gcs", "bucket": server.make_bucket(), "endpoint_url": server.url}


@pytest.mark.parametrize("how", ["EIO", "EACCES", "dead"])
@pytest.mark.parametrize("call", ["restore_path", "download"])
def test_every_request_in_every_way(call: str, how: str, tmp_path: Path, moto_server: S3Server) -> None:
    short.test_whatever_request_fails_what_is_there_is_whole(call, how, tmp_path, moto_server)
