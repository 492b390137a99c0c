"""Retention and resume beside another process that removes checkpoints at random, two hundred rounds."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from support.removals import Training
from support.servers import S3Server


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_training_beside_random_removals_keeps_what_is_promised(
    home: Path, tmp_path: Path, moto_server: S3Server, kind: str
) -> None:
    storage: dict[str, Any] = {"type": "directory", "container_path": str(tmp_path / "store")}
    if kind == "s3":
        storage = moto_server.storage(moto_server.make_bucket(), "some/prefix")
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    training = Training(storage, seed)
    training.run(200)
    print(f"{training.removals} removed by the other process, {training.expired} deleted by retention")
