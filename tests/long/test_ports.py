"""All ports below `check-resume`: every wrong one is told, four of five by their cause first; no right one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ports


def test_every_wrong_port_is_told_and_most_by_their_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {}
    for name, wrong in ports.WRONG.items():
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        outcomes[name] = outcome = ports.check_wrong(name, folder)
        print(f"{name}: {'named' if outcome.is_named(wrong) else f'not as {wrong.cause}'}: {outcome.causes}")
        print(*outcome.texts, *outcome.said, sep="\n")
    untold = [name for name, outcome in outcomes.items() if not outcome.is_told]
    named = [name for name, outcome in outcomes.items() if outcome.is_named(ports.WRONG[name])]
    print(f"{len(outcomes) - len(untold)} told and {len(named)} named of {len(outcomes)}")
    assert not untold
    assert len(named) >= 0.8 * len(outcomes)


@pytest.mark.parametrize("name", ports.RIGHT)
def test_right_port_sees_neither_finding_nor_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ports.check_right(name, tmp_path)
    assert outcome.causes == () and outcome.status == 0, outcome.texts
    assert not outcome.said
