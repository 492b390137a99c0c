"""What many tests of checkpoints begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.core._checkpoint import CheckpointContext
from support.checkpoints import Recorder, alone


@pytest.fixture
def context(tmp_path: Path) -> Iterator[CheckpointContext]:
    """That of one rank, on ``tmp_path/store``."""
    with alone() as distributed:
        yield Recorder().context(distributed, tmp_path / "store")
