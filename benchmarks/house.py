"""Size of the repository and cost of its tests: README, rooms, the demo's environment, last runs.

The minutes are those of the last ``make test`` and ``make ci`` in this checkout (``.stats``), here and beside
whatever ran there; a target that has not run here has no figure.
"""

import json
import subprocess
import sys
from typing import Any

from benchmarks._bench import QUICK, Args, Table, Tables, at_most, program
from benchmarks._processes import ROOT

DEMO = ".venvs/demo"
CI = ("fast", "stores", "postgres", "launchers", "trainings", "timm")
ROOMS = {"accelerated": 4700, "pytorch": 3750, "pytorch/deepspeed": 940, "_training": 760}
Row = tuple[str, float | None, float]


def measure(args: Args) -> Tables:
    command = [sys.executable, str(ROOT / "tests/support/stats.py"), "--depth", "3", "--json"]
    stats = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    table = Table("the house, as one meets it", ["figure"])
    text = (ROOT / "README.md").read_text()
    readme = [("README, lines", len(text.splitlines()), 200), ("README, words", len(text.split()), 1600)]
    for what, figure, bound in (*readme, *([] if QUICK else demo()), *rooms(stats), *runs(stats)):
        table.row(what, figure, bound=at_most(figure, bound))
    yield table


def demo() -> list[Row]:
    """Return the sizes that ``make demo`` installs; make its environment if it is missing."""
    subprocess.run(["make", f"{DEMO}/.installed"], cwd=ROOT, check=True, stdout=sys.stderr)
    packages = list((ROOT / DEMO).glob("lib/python*/site-packages/*.dist-info"))
    # Blocks, as du counts them, in units of 512 bytes on every file system; a link counts as itself.
    used = sum(path.lstat().st_blocks * 512 for path in (ROOT / DEMO).rglob("*"))
    return [("make demo, packages", len(packages), 40), ("make demo, MB of environment", used / 1e6, 1200)]


def rooms(stats: dict[str, Any]) -> list[Row]:
    """Lines of the rooms that have a bound, and imports that go in a circle."""
    lines = {room: float(found["lines"]) for room, found in stats["source"].items()}
    parts = {room: sum(n for name, n in lines.items() if f"{name}/".startswith(f"{room}/")) for room in ROOMS}
    parts["pytorch"] -= parts["pytorch/deepspeed"]
    return [
        ("tests, lines", float(stats["tests"]["all"]["lines"]), 50_000),
        *((f"{room}, lines", parts[room], bound) for room, bound in ROOMS.items()),
        ("circles of imports", len(stats["import circles"]["at import"]), 0),
    ]


def runs(stats: dict[str, Any]) -> list[Row]:
    """Return the cost of the last test runs; None if one of the targets has not run here."""
    last = stats["last run"]
    fast = last.get("fast", {})
    # A sum without one of the targets would meet the bound for what it leaves out.
    if last.keys() >= set(CI):
        whole = sum(last[target]["wall s"] for target in CI) / 60
    else:
        whole = None
    return [
        ("make test, minutes", fast["wall s"] / 60 if fast else None, 7),
        ("make test, CPU s", fast["CPU s"] if fast else None, 650),
        ("make ci, minutes of its targets one by one", whole, 35),
    ]


if __name__ == "__main__":
    program(measure, __doc__)
