"""What an experiment runs: from its ``entrypoint`` to the command (wire contract, sections 3.3 and 14)."""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

LAUNCHERS = ("torch_distributed", "deepspeed", "horovod", "tensorflow", "wrap_rank")
"""The modules of det_core.launch that stand in for foreign ones of the same name."""
_FOREIGN = re.compile(r"(?<![\w.])determined\.launch\.(\w+)")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PLAIN_FILE = re.compile(r"(?!/)[\w./-]+\.py")
_LOCAL_PROGRAM = re.compile(r"\./[\w./-]+")
_LAUNCH = re.compile(r"(det_core|determined)\.launch\.")
_TRIAL_CLASS = re.compile(r"[a-zA-Z0-9_.]+:[a-zA-Z0-9_]+")


def entrypoint_command(entrypoint: str | Sequence[str]) -> list[str]:
    """The command that runs an experiment's entrypoint.

    Args:
        entrypoint: a list is the command itself; ``module:Class`` names a trial class; any other text is for ``sh``.
            ``determined.launch.X`` in any of them becomes ``det_core.launch.X``.
    """
    if not isinstance(entrypoint, str):
        return [_ours(word) for word in entrypoint]
    if _TRIAL_CLASS.fullmatch(entrypoint):
        return ["python3", "-m", "det_core.launch.torch_distributed", "--", "--trial", entrypoint]
    return ["sh", "-c", _ours(entrypoint)]


def entrypoint_trial(entrypoint: str | Sequence[str]) -> tuple[str, str] | None:
    """Module and name of the trial class that an entrypoint runs; None: it runs none, or only a shell could tell."""
    if isinstance(entrypoint, str) and _TRIAL_CLASS.fullmatch(entrypoint):
        module, _, name = entrypoint.partition(":")
        return module, name
    for words in _commands(entrypoint):
        for before, word in pairwise(words):
            if before in ("--trial", "det_core.exec.harness") and _TRIAL_CLASS.fullmatch(word):
                module, _, name = word.partition(":")
                return module, name
    return None


def binds(source: str, name: str) -> bool:
    """Whether a module's source binds a name at its top level, as far as can be seen without running it.

    A class, a function, an import or an assignment does; ``import *`` may. Source that cannot be read counts as well:
    importing it will tell.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    found: set[str] = set()
    for node in _top_level(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return name.partition(".")[0] in found or "*" in found


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those within ``if``, ``try`` and ``with`` among them."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top_level(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


def foreign_launchers(entrypoint: str | Sequence[str]) -> list[str]:
    """The names of the foreign launch modules in it, each once."""
    words = [entrypoint] if isinstance(entrypoint, str) else entrypoint
    return list(dict.fromkeys(name for word in words for name in _FOREIGN.findall(word)))


def entrypoint_script(entrypoint: str | Sequence[str]) -> str | None:
    """The file that an entrypoint certainly runs by Python, below the context directory.

    That is the first word in ``.py`` of ``python … X.py`` (or ``python -m LAUNCHER … X.py``). None: it runs none, or
    only a shell could tell which.
    """
    for words in _commands(entrypoint):
        if words[:1] in (["cd"], ["pushd"]):
            return None  # whatever follows, it runs elsewhere
        while words and (words[0] in ("exec", "env", "time") or _ASSIGNMENT.match(words[0])):
            words = words[1:]
        if not words or not _PYTHON.fullmatch(words[0]):
            continue
        script = next((w for w in words[1:] if w == "-c" or w.endswith(".py")), "-c")
        return script if _PLAIN_FILE.fullmatch(script) else None
    return None


def entrypoint_needs(entrypoint: str | Sequence[str]) -> str | None:
    """The file, below the context directory, without which an entrypoint certainly cannot begin.

    None: its first command is no file of the context, or only a shell could tell which; what a later command runs may
    have been made by those before it.
    """
    words = next(_commands(entrypoint), [])
    while words and (words[0] in ("exec", "env", "time") or _ASSIGNMENT.match(words[0])):
        words = words[1:]
    if words and _LOCAL_PROGRAM.fullmatch(words[0]):
        needed: str | None = words[0]
    else:
        needed = entrypoint_script(words)
        before = words[: words.index(needed)] if needed is not None else []
        if "-m" in before and not any(_LAUNCH.match(word) for word in before):
            return None  # another module's argument need not be there
    return None if needed is None or posixpath.normpath(needed).startswith("..") else needed


def _commands(entrypoint: str | Sequence[str]) -> Iterator[list[str]]:
    """The words of each command in it."""
    if not isinstance(entrypoint, str):
        yield list(entrypoint)
        return
    splitter = shlex.shlex(entrypoint, posix=True, punctuation_chars=";&|()<>")
    splitter.whitespace_split = True
    words: list[str] = []
    try:
        for word in splitter:
            if word and not word.strip(";&|()<>"):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError:  # a quotation that does not end: the shell will say so
        return
    yield words


def _ours(text: str) -> str:
    return _FOREIGN.sub(r"det_core.launch.\1", text)
