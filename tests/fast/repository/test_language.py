"""The language of each room: how docstrings begin, worn phrases, comments, conditional expressions.

Rooms stand in ``language.json`` with the measures that miss their aims (``support.language``), which may only get
better; all other rooms, and all other measures, are at the aims.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support import ROOT
from support.language import (
    MAX_COUNTS,
    beyond_aims,
    by_room,
    code_lines,
    measure,
    measure_statements,
    python_files,
    room_of,
)

TABLE = Path(__file__).with_name("language.json")
"""Room -> measure -> the worst figure it may have."""


# With fields where the measures would find their own test.
SAMPLE = """
{quotes}What it is.{quotes}
limit = 3
{quotes}Those that count, no matter who is {told}.{quotes}

def f(a):
    {quotes}Whether there is {no} b, "# not a comment".{quotes}
    x, y = 1, 2  # as {perceived}
    return a if x else y  # noqa

class C:
    @property
    def is_open(self):
        {quotes}Whether it is open; is no longer counted.{quotes}
"""


def not_imperative() -> Counter[str]:
    """Return ruff's count of docstrings that are not imperative, by room."""
    options = ["--select", "D401", "--config", "lint.per-file-ignores = {}", "--output-format", "json", "--exit-zero"]
    command = [sys.executable, "-m", "ruff", "check", *options, "."]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    paths = (Path(violation["filename"]) for violation in json.loads(output))
    return Counter(room_of(path, ROOT) for path in paths)


def test_language_of_each_room_only_gets_better() -> None:
    rooms = by_room(python_files())
    assert len(rooms) > 40, "the modules were not found"
    for room, count in not_imperative().items():
        rooms[room]["D401"] = count
    found = {room: beyond_aims(room, counts) for room, counts in sorted(rooms.items())}
    found = {room: missed for room, missed in found.items() if missed}
    allowed = json.loads(TABLE.read_text())
    worse = [
        f"{room}: {name} is {figure}, at most {limits.get(name, 0)}"
        for room, missed in found.items()
        for name, figure in missed.items()
        if not _is_allowed(name, figure, (limits := allowed.get(room, {})))
    ]
    reached = [f"{room}: {name}" for room in allowed for name in allowed[room] if name not in found.get(room, {})]
    lines = ",\n".join(f" {json.dumps(room)}: {json.dumps(missed)}" for room, missed in found.items())
    table = f"\n{{\n{lines}\n}}\n"
    assert not worse, f"reword them, by the aims in tests/support/language.py. Today's table: {table}"
    assert not reached, f"at the aims now, and to be deleted from {TABLE.name}. Today's table: {table}"


def _is_allowed(name: str, figure: float, limits: dict[str, float]) -> bool:
    if name not in limits:
        return False
    # A longer name breaks a line in two, and moves all rates of its room a little.
    if name == "comment":
        return figure >= 0.95 * limits[name]
    return figure <= limits[name] * (1 if name in MAX_COUNTS else 1.05)


def test_measure_counts_each_fault_once() -> None:
    text = SAMPLE.format(quotes='"' * 3, no="no", told="told", perceived="h" + "eard")
    counts = {name: n for name, n in (measure(text) + measure_statements(text)).items() if n}
    assert counts == {
        "lead": 2,
        "whether": 1,
        "no": 1,
        "told": 2,
        "tuple": 1,
        "conditional": 1,
        "comment": 1,
        "code": 7,
    }


def test_code_lines_leave_out_docstrings_comments_and_blank_lines() -> None:
    assert code_lines('"""One\ntwo."""\n\n# three\nx = f"{y}" "#"  # why\nz = """\nfive\n"""\n') == 2
