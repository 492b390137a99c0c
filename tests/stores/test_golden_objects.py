"""A run of an earlier version whose checkpoints are in S3 is read and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fast.repository import test_golden as golden
from fast.repository.test_golden import in_s3

__all__ = ["in_s3"]


def test_golden_run_of_one_rank_in_object_store_is_read_and_resumes(in_s3: dict[str, Any], tmp_path: Path) -> None:
    golden.test_golden_run_in_object_store_is_read_and_resumes(in_s3, tmp_path, ranks=1)
