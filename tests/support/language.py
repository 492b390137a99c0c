"""Measures of the code's language: how docstrings begin, worn phrases, comments, conditional expressions.

``python tests/support/language.py det_core/core tests/fast/core`` prints them for folders.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_COUNTS = ("lead", "whether", "D401")
"""Measures of docstrings, by count, of which there should be none.

``lead``: docstrings that begin with What, Who, How or Those; ``whether``: functions' that begin with Whether;
``D401``: functions' that are not imperative, as ruff counts them.
"""
MAX_RATES = {"no": 0.5, "told": 0.2, "conditional": 12.0, "tuple": 3.0}
"""Measure -> largest rate per 1,000 lines of code.

``no``: "X is no Y"; ``told``: the passive of tell and say, and of hearing; ``conditional``: conditional expressions;
``tuple``: assignments of a tuple to a tuple.
"""
MIN_COMMENTS = 30.0
"""Smallest rate of comments per 1,000 lines of code."""

_LEAD = re.compile(r'^\s*[rR]?"""\s*(?:What|Who|How|Those)\b', re.MULTILINE)
_NO = re.compile(r"\b(?:is|are|was|were) no (?!longer|more|less)[a-z]")
_TOLD = re.compile(r"\b(?:(?:is|are|was|were|be|been) (?:told|said)|hears?|heard)\b")
# Not by tokenize, which takes two seconds for all files and reads an f-string differently in each version of Python.
# Triple quotes come first: at any other quote they would be an empty string and the start of a second one.
_STRING_OR_COMMENT = re.compile(
    r"(?:\b[rbfuRBFU]{1,2})?"
    r'(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')|(#[^\n]*)',
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:)")
_CODE = re.compile(r"^.*[^\s\d].*$", re.MULTILINE)


def python_files(root: Path = ROOT) -> list[Path]:
    """Return the repository's own modules; migrations and the golden home are records that never change."""
    folders = ("det_core", "launchers", "examples", "benchmarks", "docs", "tests")
    paths = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(path for path in paths if not {"migrations", "home"} & set(path.parts))


def room_of(path: Path, root: Path = ROOT) -> str:
    """Return the room of a module, such as ``det_core/core``, ``tests/fast/ipc`` or ``benchmarks``."""
    parts = path.relative_to(root).parts[:-1]
    if parts[:2] == ("tests", "fast"):
        return "/".join(parts[:3])
    if parts[0] in ("det_core", "tests"):
        return "/".join(parts[:2])
    return parts[0]


def code_lines(text: str) -> int:
    """Return the number of lines of a module that are not docstrings, comments or blank."""
    return len(_CODE.findall(_STRING_OR_COMMENT.sub(_blank, text)))


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def measure(text: str) -> Counter[str]:
    """Return the counts of one module that its text shows, and ``code``, its lines of code."""
    counts = Counter(code=code_lines(text))
    counts["lead"] = len(_LEAD.findall(text))
    counts["no"] = len(_NO.findall(text))
    counts["told"] = len(_TOLD.findall(text))
    return counts


def measure_statements(text: str) -> Counter[str]:
    """Return the counts of one module that its syntax tree and its comments show."""
    comments = filter(None, _STRING_OR_COMMENT.findall(text))
    counts = Counter(comment=sum(not _DIRECTIVE.match(comment) for comment in comments))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.IfExp):
            counts["conditional"] += 1
        elif isinstance(node, ast.Assign):
            counts["tuple"] += isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(mark) for mark in node.decorator_list)
            counts["whether"] += not is_property and (ast.get_docstring(node) or "").startswith("Whether")
    return counts


def by_room(paths: Iterable[Path], root: Path = ROOT) -> dict[str, Counter[str]]:
    """Return the summed counts of each room; of tests those of their text alone, which is what people read there."""
    rooms: dict[str, Counter[str]] = {}
    for path in paths:
        room, text = room_of(path, root), path.read_text()
        counts = rooms.setdefault(room, Counter())
        counts.update(measure(text))
        if not is_tests(room):
            counts.update(measure_statements(text))
    return rooms


def is_tests(room: str) -> bool:
    """Return whether a room holds tests."""
    return room.partition("/")[0] == "tests"


def rate(counts: Counter[str], name: str) -> float:
    """Return a count per 1,000 lines of code, to one decimal."""
    return round(1000 * counts[name] / max(counts["code"], 1), 1)


def beyond_aims(room: str, counts: Counter[str]) -> dict[str, float]:
    """Return the measures of a room that miss their aims: counts of docstrings, rates of the others.

    A room too small for one comment at the smallest rate needs none.
    """
    missed: dict[str, float] = {name: counts[name] for name in MAX_COUNTS if counts[name]}
    missed |= {name: rate(counts, name) for name, aim in MAX_RATES.items() if rate(counts, name) > aim}
    if not is_tests(room) and counts["comment"] < int(MIN_COMMENTS * counts["code"] / 1000):
        missed["comment"] = rate(counts, "comment")
    return missed


def main(folders: list[str]) -> None:
    """Print the counts and rates of folders."""
    for folder in folders:
        counts: Counter[str] = Counter()
        for path in Path(folder).rglob("*.py"):
            text = path.read_text()
            counts.update(measure(text))
            counts.update(measure_statements(text))
        print(folder, dict(counts), {name: rate(counts, name) for name in (*MAX_RATES, "comment")})


if __name__ == "__main__":
    main(sys.argv[1:])
