"""Every benchmark runs, with the least of everything, and prints its table; ``--help`` says what it measures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support import ROOT

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


def benchmark(*words: str) -> str:
    """Return the output of ``python -m benchmarks…``."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_printed(name: str) -> None:
    said = benchmark(f"benchmarks.{name}", "--quick")
    head, rule, *rows = said.partition("--quick: these figures mean nothing")[2].splitlines()[1:]
    assert head.split() and set(rule) == {" ", "-"} and rows, said


@pytest.mark.parametrize("name", NAMES)
def test_help_measures_nothing(name: str) -> None:
    said = benchmark(f"benchmarks.{name}", "--help")
    assert said.startswith("usage: ") and "--quick" in said and "----" not in said


def test_all_of_them_or_those_that_are_named() -> None:
    assert all(name in benchmark("benchmarks", "--help") for name in NAMES)
    assert "these figures mean nothing" in benchmark("benchmarks", "--quick", "import_time")


def test_rows_as_json() -> None:
    rows = [json.loads(line) for line in benchmark("benchmarks.import_time", "--quick", "--json").splitlines()]
    assert [row["row"] for row in rows] == ["det_core", "det_core, and core.init"]
    assert rows[0]["benchmark"] == "import_time" and rows[0]["ms"] > 0 and rows[0]["bound"] == "<= 30"


def test_another_commit_is_a_contender_from_its_own_tree() -> None:
    said = benchmark("benchmarks.import_time", "--quick", "--against", "HEAD")
    assert "det_core at " in said
