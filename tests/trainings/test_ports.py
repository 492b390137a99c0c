"""Ports that are wrong are found by `check-resume`, each by its cause; right ones are not. ``long`` has all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support import ports, warm
from support.commands import det_core


@pytest.mark.parametrize("name", ["optimizer", "counter", "order_after_the_last_batch", "ema"])
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


def test_right_port_on_two_ranks_is_equal_as_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launched = [warm.python(warm.HERE), *ports.RIGHT["ranks"]]
    done = det_core("check-resume", "--json", "--", "det-core", "run", "--slots", "2", "--", *launched)
    stopped = json.loads(done.stdout)["runs"][2]
    assert (stopped["training"], stopped["ranks"], stopped["rows"]) == ("stopped", [2, 2], 24)
    told = re.search(r"stopped after step (\d+), resumed", done.stderr)
    assert told is not None and int(told[1]) == stopped["resumed_from"], "the step on which the ranks have agreed"


def test_wrong_port_is_found_as_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    warm.add_command(python)
    words = ["det-core", "run", "--", python, ports.write("counter", tmp_path).name]
    done = det_core("check-resume", "--json", "--", *words, check=1)
    assert [finding["cause"] for finding in json.loads(done.stdout)["findings"]] == ["starts_over"]
