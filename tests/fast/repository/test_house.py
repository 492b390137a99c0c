"""The rules of the house: which room may import which, and where the environment is read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support import ROOT
from support.language import code_lines
from support.stats import WHEN, circles, read

PACKAGE = ROOT / "det_core"

CELLAR = {
    "_clock",
    "_env",
    "_environments",
    "_forks",
    "_info",
    "_json",
    "_length",
    "_metadata",
    "_notices",
    "_optional",
    "_standalone",
    "_storage_settings",
    "_torch_states",
    "_version",
    "_walk",
    "errors",
}
ALLOWED: dict[str, set[str]] = {
    "_standalone": set(),
    "journal": set(),
    "storage": set(),
    "ipc": set(),
    "config": set(),
    "search": set(),
    "protocol": set(),
    "backend": {"journal", "protocol"},
    "core": {"backend", "journal", "storage", "ipc", "protocol"},
    "launch": set(),
    "_training": set(),
    "pytorch": {"core", "_training"},
    "tensorboard": {"core"},
    "accelerated": {"core", "_training"},
    "exec": {"pytorch", "config"},
    "testing": {"search"},
    "client": {"config", "journal", "storage", "core", "protocol"},
    "master": {"config", "search", "journal", "storage", "protocol"},
    "check_resume": {"client", "core", "journal", "protocol"},
    "slurm": {"core", "journal"},
    "cli": {"backend", "check_resume", "client", "config", "core", "journal", "protocol", "search", "slurm", "storage"},
}
"""Room -> the rooms it may import from, beside itself and the cellar."""


def _sources() -> list[tuple[str, Path]]:
    """Return every module with its room; the launchers are reached by the symlink."""
    return [
        (path.relative_to(PACKAGE).parts[0], path)
        for room in ALLOWED
        for path in sorted((PACKAGE / room).rglob("*.py"))
    ]


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> set[str]:
    """Return the parts of det_core that a module imports, anywhere in it."""
    found = set()
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "det_core":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("det_core.")}
    return found


def test_rooms_import_lower_rooms_only() -> None:
    sources = _sources()
    assert len(sources) > 60, "the sources were not found"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, path in sources
        for name in sorted(_imports(path) - ALLOWED[room] - CELLAR - {room})
    ]
    assert not wrong


def test_import_of_deepspeed_is_deferred_to_first_use() -> None:
    """Its room lies in theirs: nothing of theirs imports it, and it imports the framework inside functions alone."""
    room = PACKAGE / "pytorch" / "deepspeed"
    below = [path for path in (PACKAGE / "pytorch").glob("*.py") if "pytorch.deepspeed" in path.read_text()]
    at_once = [
        path
        for path in room.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.split(".")[0] == "deepspeed"
    ]
    assert len(list(room.glob("*.py"))) > 4 and not below and not at_once


def test_map_names_every_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ALLOWED)


def test_environment_variables_are_read_in_one_module() -> None:
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in _nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
    }
    # The launcher hands its whole environment on to what it starts.
    assert {r for r in readers if not r.startswith("launch/")} == {"_env.py"}


def test_files_and_functions_stay_small() -> None:
    functions = [
        (path, node)
        for _, path in _sources()
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    # Of code alone: nobody should have to split a module for one more docstring or comment.
    long_files = [str(p) for _, p in _sources() if code_lines(p.read_text()) > 480]
    small = sum((f.end_lineno or f.lineno) - f.lineno < 40 for _, f in functions)
    assert not long_files
    assert small / len(functions) >= 0.95


def test_the_global_random_numbers_are_the_scripts() -> None:
    """A retry that drew its pause from them would change the script's data. Seeding and states are asked for."""
    allowed = {"Random", "SystemRandom", "getstate", "setstate", "seed"}
    drawn = []
    for path in PACKAGE.rglob("*.py"):
        nodes = _nodes(path)
        names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        used = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "random"}
        used = used if "random" in names else set()
        taken = {a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "random" for a in n.names}
        drawn += [f"{path.relative_to(PACKAGE)}: {name}" for name in sorted((used | taken) - allowed)]
    assert not drawn


def test_imports_have_no_circle() -> None:
    """Not lazily and not for typing either: whoever reads one file can stop at what it stands on."""
    found = circles(read(PACKAGE, ROOT, 1))
    assert sorted(found) == sorted(WHEN)
    above = tuple(f"det_core.{room}." for room in ("master", "client", "cli"))
    wrong = [
        f"{when}: {' -> '.join(each['circle'])}"
        for when, components in found.items()
        for each in components
        if not all(name.startswith(above) for name in each["circle"])
    ]
    assert not wrong
