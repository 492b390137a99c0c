"""Tests wait for events, not by the clock; what is left of sleeps and time limits may only shrink."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from support import TESTS

LIST = Path(__file__).with_name("clocks.json")
"""File -> how many sleeps of more than 0.1 s and literal time limits it has."""
LIMITS = ("wait", "join", "result", "communicate", "get", "acquire")
_MAYBE = re.compile(rf"sleep|timeout|monotonic|({'|'.join(LIMITS)})\(\s*[\d.]")
"""Matches in every file that has a clock: to parse all takes seconds."""


def clocks(source: str) -> int:
    """Return how often a test sleeps for more than 0.1 s, limits a wait by a literal, or computes a deadline."""
    if not _MAYBE.search(source):
        return 0
    return sum(_is_clock(node) for node in ast.walk(ast.parse(source)))


def _is_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = _number(node.args[0]) if node.args else None
        if name == "sleep":
            return first is not None and first > 0.1
        if any(k.arg == "timeout" and _number(k.value) for k in node.keywords):
            return True
        return name in LIMITS and len(node.args) == 1 and first is not None and first > 0.1
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and isinstance(node.left, ast.Call)
        and getattr(node.left.func, "attr", "") == "monotonic"
    )


def _number(node: ast.AST) -> float | None:
    value = getattr(node, "value", None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def test_clocks_of_tests_only_shrink() -> None:
    found = {
        str(path.relative_to(TESTS)): count
        for path in sorted(TESTS.rglob("*.py"))
        if (count := clocks(path.read_text()))
    }
    listed = json.loads(LIST.read_text())
    more = {name: count for name, count in found.items() if count > listed.get(name, 0)}
    assert not more, f"wait with support.processes.until, without a limit: {more}"
    assert found == listed, f"there are fewer; the list is now {json.dumps(found, indent=1)}"


def test_clocks_sleep_limit_or_deadline_is_counted() -> None:
    assert clocks("time.sleep(0.5); p.wait(60); run(x, timeout=3); t = time.monotonic() + LIMIT") == 4
    assert clocks("time.sleep(0.1); p.wait(); wait(60, 70); run(x); t = time.monotonic()") == 0
