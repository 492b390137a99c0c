"""Retention and resume beside another process that removes checkpoints at random: a few rounds.

``tests/stores`` has some on S3, and ``tests/long/test_checkpoint_removals.py`` two hundred of each, drawn anew.
"""

from __future__ import annotations

from pathlib import Path

from support.removals import Training

SEED = 3


def test_training_beside_random_removals_in_a_directory_keeps_what_is_promised(home: Path, tmp_path: Path) -> None:
    training = Training({"type": "directory", "container_path": str(tmp_path / "store")}, SEED)
    training.run(10)
    assert training.removals > 0
