"""Every request to an S3 server fails once, in every way, whatever is done."""

from __future__ import annotations

from pathlib import Path

import pytest

import stores.test_s3_faults as short
from stores.test_s3_faults import OPERATIONS, Operation, delete, proxy, restore, upload, upload_large
from support.proxy import BUSY, FAULTS, LOST, RESET, Proxy
from support.servers import S3Server

__all__ = ["proxy"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_network_fault_is_retried(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, operation: Operation, fault: str
) -> None:
    short.test_one_network_fault_is_retried(moto_server, proxy, tmp_path, operation, fault, step=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_network_fault_in_a_multipart_upload_is_retried(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, fault: str
) -> None:
    short.test_one_network_fault_in_a_multipart_upload_is_retried(moto_server, proxy, tmp_path, fault, range(1, 6))


@pytest.mark.parametrize("fault", [LOST, BUSY, RESET])
@pytest.mark.parametrize("operation", [upload, upload_large, restore, delete])
def test_lasting_network_fault_is_named_and_leaves_nothing_listed(
    moto_server: S3Server, proxy: Proxy, tmp_path: Path, operation: Operation, fault: str
) -> None:
    short.test_lasting_network_fault_is_named_and_leaves_nothing_listed(
        moto_server, proxy, tmp_path, operation, fault, step=1
    )
