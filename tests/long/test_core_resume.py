"""Starts beside a process that removes checkpoints at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.removing import start_beside_remover


def test_no_start_fails_while_another_process_removes_all_but_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_CORE_HOME", str(tmp_path / "home"))
    start_beside_remover(200)
