"""``tests/promises.md``: every page of the documentation has its promises, and every test that shows one exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from support import ROOT, TESTS

TABLES = dict(re.findall(r"^## (\S+)\n\n(.*?)(?:\n\n|\n?\Z)", (TESTS / "promises.md").read_text(), re.M | re.S))
ROW = re.compile(r"\| [^|]+ \| (`[^`|]+`(?:, `[^`|]+`){0,2}) \|")
GENERATED = "docs/reference"


def test_every_promise_names_tests_that_exist() -> None:
    for page, table in TABLES.items():
        head, line, *rows = table.splitlines()
        assert (head, line) == ("| promise | shown by |", "| --- | --- |") and rows, page
        for row in rows:
            shown_by = ROW.fullmatch(row)
            assert shown_by, f"{page}: {row}"
            missing = [name for name in re.findall(r"`(.*?)`", shown_by[1]) if not _exists(name)]
            assert not missing, f"{page}: {missing}"


def _exists(name: str) -> bool:
    """Return whether such a file of tests exists, with a test of that name if it names one."""
    file, _, test = name.partition("::")
    path = TESTS / file
    if not path.is_file() or not path.name.startswith("test_"):
        return False
    return not test or (test.startswith("test_") and test in _functions(path))


@cache
def _functions(path: Path) -> set[str]:
    """Return the functions of a file and of its classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_page_has_its_promises() -> None:
    pages = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")}
    assert set(TABLES) == {"README.md", *(page for page in pages if not page.startswith(GENERATED))}
