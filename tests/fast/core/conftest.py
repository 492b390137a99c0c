"""Fixtures of the core tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.core import _event_writer
from det_core.core._checkpoint import CheckpointContext
from support.checkpoints import Recorder, alone


@pytest.fixture
def context(tmp_path: Path) -> Iterator[CheckpointContext]:
    """Return the checkpoint context of one rank, on ``tmp_path/store``."""
    with alone() as distributed:
        yield Recorder().context(distributed, tmp_path / "store")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with much else to do the first import of TensorBoard alone takes longer than a user would wait."""
    monkeypatch.setattr(_event_writer, "FLUSH_TIMEOUT", 120.0)
