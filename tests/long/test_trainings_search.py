"""The quickstart's digits as a search, by the examples' own files and by commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fast.examples.test_search import brackets_of, check_decisions, followed, person
from support import EXAMPLES
from support.person import Person

pytest.importorskip("torch")
pytest.importorskip("sklearn")

__all__ = ["person"]


def test_the_digits_as_a_grid(person: Person) -> None:
    told = digits(person, "grid", 5)
    assert sorted(t["hparams"]["lr"] for t in told["trials"]) == pytest.approx(
        [10**x for x in (-4, -3.5, -3, -2.5, -2)]
    )
    assert [len(rows(person, t["id"])) for t in told["trials"]] == [4] * 5


def test_the_digits_at_random(person: Person) -> None:
    told = digits(person, "random", 8)
    assert len({json.dumps(t["hparams"]) for t in told["trials"]}) == 8


def test_the_digits_by_adaptive_asha(person: Person, home: Path) -> None:
    told = digits(person, "adaptive", 16)
    assert brackets_of(told) == [(12, [1, 4, 16]), (4, [4, 16])]
    check_decisions(home, told, divisor=4, concurrent=[8, 8])
    lengths = [len(rows(person, t["id"])) for t in told["trials"]]
    assert set(lengths) <= {1, 4, 16} and lengths.count(16) >= 1 and lengths.count(1) >= 6


def digits(person: Person, name: str, trials: int) -> Any:
    """Search with one of the examples."""
    told = followed(person, str(EXAMPLES / "search" / f"{name}.yaml"), str(EXAMPLES / "quickstart"), trials)
    assert told["trials"][0]["best_metric"] > 0.8
    return told


def rows(person: Person, trial_id: int) -> list[Any]:
    """Return the validations of a trial."""
    found: list[Any] = person.reads("trial", "metrics", str(trial_id), "--group", "validation")
    return found
