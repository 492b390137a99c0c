"""Figures of the code and its tests: lines by room, import circles, CPU seconds of the last test runs (``make stats``).

Reads the files and imports none; an import by a string (``importlib``) is not seen. ``cpu.py`` keeps the seconds.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import tokenize
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

WHEN = ("at import", "lazily", "for typing")  # of the module, in a function, under `if TYPE_CHECKING`
RUN = ("CPU s", "in tests", "wall s", "passed", "failed", "error", "skipped", "ended")
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Module:
    """A file of Python; its room is the folder it lies in, or ``.``."""

    name: str
    path: Path
    room: str
    text: str

    @cached_property
    def lines(self) -> int:
        """Number of its lines."""
        return len(self.text.splitlines())

    @cached_property
    def comments(self) -> int:
        """Number of its comments."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline) if "#" in self.text else ()
        return sum(token.type == tokenize.COMMENT for token in tokens)


def read(folder: Path, names_from: Path, depth: int) -> dict[str, Module]:
    """Return all modules below a directory by dotted name, in rooms ``depth`` directories deep.

    The launchers are reached by a symlink.
    """
    found = {}
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(set(folders) - {"home"})  # tests/golden/home: checkpoints hold scripts, not modules
        for path in (Path(parent, file) for file in sorted(files) if file.endswith(".py")):
            parts = path.relative_to(names_from).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            room = str(Path(*path.relative_to(folder).parts[:-1][:depth]))
            found[name] = Module(name, path, room, path.read_text())
    return found


def rooms(modules: dict[str, Module], used: Counter[Path] | None = None) -> Table:
    """Return the figures of each room, and of all; with CPU seconds by file, those too."""
    found = {}
    for room in [*sorted({module.room for module in modules.values()}), "all"]:
        group = [module for module in modules.values() if room in (module.room, "all")]
        lines, longest = sum(module.lines for module in group), max(group, key=lambda module: module.lines)
        found[room] = {
            "modules": len(group),
            "lines": lines,
            "median": round(median(module.lines for module in group)),
            "longest": longest.lines,
            "comments/100": round(100 * sum(module.comments for module in group) / max(lines, 1), 1),
            **({} if used is None else {"CPU s": round(sum(used[module.path] for module in group), 1) or None}),
            "named": longest.name,
        }
    return found


def imports(module: Module, modules: dict[str, Module]) -> dict[str, int]:
    """Return the modules that one imports, and when at the earliest.

    To import ``a.b.c`` runs ``a/__init__.py`` and ``a/b/__init__.py`` too, but for those that run already: its own.
    """
    found: dict[str, int] = {}
    within = _packages(module.name) | {module.name}
    for when, statement in _statements(ast.parse(module.text)):
        for target in _targets(statement, module, modules):
            for name in {target} | (_packages(target) - within):
                if name in modules and name != module.name:
                    found[name] = min(when, found.get(name, when))
    return found


def _packages(name: str) -> set[str]:
    return {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}


def _statements(node: ast.AST, when: int = 0) -> Iterator[tuple[int, ast.Import | ast.ImportFrom]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield when, child
        elif isinstance(child, ast.If) and ast.unparse(child.test).split(".")[-1] == "TYPE_CHECKING":
            yield from _statements(ast.Module(child.body, []), 2)
            yield from _statements(ast.Module(child.orelse, []), when)
        elif not isinstance(child, ast.expr):
            yield from _statements(child, max(when, isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)))


def _targets(statement: ast.Import | ast.ImportFrom, module: Module, modules: dict[str, Module]) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    package = module.name.split(".")[: None if module.path.name == "__init__.py" else -1]
    above = package[: len(package) - statement.level + 1] if statement.level else []
    source = ".".join([*above, *([statement.module] if statement.module else [])])
    # `from package import name` is an import of the package, unless the name is a module in it.
    return [name if (name := f"{source}.{alias.name}") in modules else source for alias in statement.names]


def circles(modules: dict[str, Module]) -> dict[str, list[dict[str, list[str]]]]:
    """Return the strongly connected components of the imports: the shortest circle of each, and its other modules.

    First of imports at import; then what is new or larger with those made lazily, and with those for typing.
    """
    arrows = {name: imports(module, modules) for name, module in modules.items()}
    found: dict[str, list[dict[str, list[str]]]] = {}
    seen: set[frozenset[str]] = set()
    for step, when in enumerate(WHEN):
        graph = {name: [to for to, at in sorted(targets.items()) if at <= step] for name, targets in arrows.items()}
        graph = _without_ends(graph)
        ways = {name: _ways(graph, name) for name in graph}
        components = {frozenset(to for to in ways[name] if name in ways[to]) for name in ways if name in ways[name]}
        found[when] = []
        for component in sorted(components - seen, key=sorted):
            closing = [(a, b) for a in sorted(component) for b in graph[a] if b in component and arrows[a][b] == step]
            circle = min(([a, *ways[b][a]] for a, b in closing), key=len)
            found[when].append({"circle": circle, "beside": sorted(component - set(circle))})
        seen |= components
    return found


def _without_ends(graph: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the part of a graph where circles can be: what imports nothing of it, or is imported by nothing, goes."""
    while True:
        imported = {to for targets in graph.values() for to in targets}
        left = {name: targets for name, targets in graph.items() if targets and name in imported}
        if len(left) == len(graph):
            return graph
        graph = {name: [to for to in targets if to in left] for name, targets in left.items()}


def _ways(graph: dict[str, list[str]], start: str) -> dict[str, list[str]]:
    """Return the shortest way to each module that one imports in the end; to itself, too, in a circle."""
    ways: dict[str, list[str]] = {}
    todo = deque([[start]])
    while todo:
        way = todo.popleft()
        for to in graph[way[-1]]:
            if to not in ways:
                todo.append(ways.setdefault(to, [*way, to]))
    return ways


def collect(root: Path, depth: int, costliest: int) -> dict[str, Any]:
    """Return all figures of a repository, by the title of their table."""
    source, tests = read(root / "det_core", root, depth), read(root / "tests", root / "tests", depth + 1)
    runs = {path.stem: json.loads(path.read_text()) for path in sorted((root / ".stats").glob("*.json"))}
    cost, used = {}, Counter[Path]()
    for run in runs.values():
        cost |= (times := run.pop("tests"))
        run["in tests"] = round(sum(map(sum, times.values())), 1)
    for test, times in cost.items():
        used[root / test.partition("::")[0]] += sum(times)
    most = sorted(cost, key=lambda test: sum(cost[test]), reverse=True)[:costliest]
    return {
        "source": rooms(source),
        "tests": rooms(tests, used),
        "import circles": circles(source),
        "import circles of tests": circles(tests),
        "last run": {target: {name: run[name] for name in RUN} for target, run in runs.items()},
        "costliest tests": {t: {"CPU s": round(sum(cost[t]), 2), "of it below": cost[t][1]} for t in most},
    }


def show(title: str, table: Table) -> None:
    """Print a table: words to the left, figures to the right."""
    rows = [[title, *next(iter(table.values()))], *([key, *row.values()] for key, row in table.items())]
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    form = ["%-*s" if isinstance(cell, str) else "%*s" for cell in rows[-1]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(f % (width, cell) for f, width, cell in zip(form, widths, row, strict=True)).rstrip())
    print()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=1, metavar="N", help="how many folders deep a room lies (1)")
    parser.add_argument("--tests", type=int, default=0, metavar="N", help="also the N tests with the most CPU seconds")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="of which repository (this one)")
    given = parser.parse_args(words)
    found = collect(given.root, given.depth, given.tests)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for title, part in found.items():
        if title.startswith("import circles"):
            print(title, *(f"{len(some)} {when}" for when, some in part.items()), sep="  ")
            for when, one in [(when, one) for when, some in part.items() for one in some]:
                beside = f"; and {len(one['beside'])} more: {', '.join(one['beside'])}" if one["beside"] else ""
                print(f"{when}: {' → '.join(one['circle'])}{beside}".replace("det_core.", ""))
            print()
        elif part:
            show(title, part)


if __name__ == "__main__":
    main()
