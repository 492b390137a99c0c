"""docs/moving.md lists every public name of Determined that det_core does not have."""

from __future__ import annotations

import importlib
import re
from fnmatch import fnmatch

import pytest

from support import ROOT

NAMES = ROOT / "tests/support/determined_names.txt"
"""A row a module: what `dir()` gave of releases 0.36.0 and 0.38.1."""
REFERENCE = ROOT.parent / "shared/reference"


def _names() -> list[str]:
    rows = [line.split(": ") for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return [f"{module}.{name}" for module, names in rows for name in names.split()]


def _is_here(name: str) -> bool:
    module, _, attribute = name.replace("determined", "det_core", 1).rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(
            importlib.import_module(f"{module}.{attribute}")
        )
    except ImportError:
        return False


def _listed() -> list[str]:
    page = (ROOT / "docs/moving.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `determined.")]
    return [pattern for row in rows for pattern in re.findall(r"`(determined\.[\w.*]+)`", row)]


def test_reference_names_exist_or_have_replacement() -> None:
    listed = _listed()
    missing = [name for name in _names() if not _is_here(name)]
    assert len(missing) > 40, "the names were not read"
    assert [name for name in missing if not any(fnmatch(name, pattern) for pattern in listed)] == []


def test_no_listed_name_is_here() -> None:
    exact = [name for name in _listed() if "*" not in name]
    assert [name for name in exact if _is_here(name)] == []


def test_names_cover_the_reference_texts() -> None:
    if not REFERENCE.is_dir():
        pytest.skip("the reference texts are not beside this checkout")
    texts = "\n".join(path.read_text() for path in sorted(REFERENCE.glob("*-api.txt")))
    headings = set(re.findall(r"\bclass (determined\.[\w.]+?)\(", texts))
    headings |= {
        f"determined.{m}" for m in re.findall(r"^determined\.(core\.[A-Z]\w+|pytorch\.[A-Z]\w+)$", texts, re.MULTILINE)
    }
    assert len(headings) > 15, "the headings were not found"
    names = set(_names())
    assert sorted(h for h in headings if h not in names and "._" not in h) == []
