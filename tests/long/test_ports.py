"""All ports below `check-resume`: every wrong one is reported by its cause first; no right one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ports


@pytest.mark.parametrize("name", ports.WRONG)
def test_wrong_port_is_reported_by_its_cause_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ports.check_wrong(name, tmp_path)
    print(name, outcome.causes, *outcome.texts, *outcome.said, sep="\n")
    assert outcome.is_named(ports.WRONG[name]), outcome.causes


@pytest.mark.parametrize("name", ports.RIGHT)
def test_right_port_sees_neither_finding_nor_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ports.check_right(name, tmp_path)
    assert outcome.causes == () and outcome.status == 0, outcome.texts
    assert not outcome.said
