"""Ports that are wrong are found by `check-resume`, each by its cause; right ones are not. ``long`` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ports


@pytest.mark.parametrize("name", ["optimizer", "counter", "generator_of_the_sampler", "ema"])
def test_wrong_port_is_found_by_its_cause(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ports.check_wrong(name, tmp_path)
    assert outcome.status != 0
    assert outcome.causes[0] == ports.WRONG[name].cause, outcome.texts


@pytest.mark.parametrize("name", ["epochs", "searchable"])
def test_right_port_sees_neither_finding_nor_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ports.check_right(name, tmp_path)
    assert outcome.causes == () and outcome.status == 0, outcome.texts
    assert all(line.startswith("det_core: ") for line in outcome.printed.splitlines()), outcome.printed
