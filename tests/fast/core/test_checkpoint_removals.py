"""Retention and resume beside another process that removes checkpoints at random: a few rounds.

``tests/long/test_checkpoint_removals.py`` has two hundred, drawn anew.
"""

from __future__ import annotations

from pathlib import Path

from support.removals import Training
from support.servers import S3Server

SEED = 3


def test_training_beside_random_removals_in_a_directory_keeps_what_is_promised(home: Path, tmp_path: Path) -> None:
    training = Training({"type": "directory", "container_path": str(tmp_path / "store")}, SEED)
    training.run(10)
    assert training.removals > 0


def test_training_beside_random_removals_on_s3_keeps_what_is_promised(home: Path, moto_server: S3Server) -> None:
    training = Training(moto_server.storage(moto_server.make_bucket(), "some/prefix"), SEED)
    training.run(4)
    assert training.removals > 0
