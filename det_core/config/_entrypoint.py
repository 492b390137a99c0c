"""Commands of experiments, from their ``entrypoint`` (wire contract, sections 3.3 and 14)."""

from __future__ import annotations

import posixpath
import re
import shlex
import symtable
from collections.abc import Sequence
from itertools import pairwise

LAUNCHERS = ("torch_distributed", "deepspeed", "horovod", "tensorflow", "wrap_rank")
"""Modules of det_core.launch that replace those of the same name in determined.launch."""
_DETERMINED_LAUNCHER = re.compile(r"(?<![\w.])determined\.launch\.(\w+)")
_TRIAL_CLASS = re.compile(r"([a-zA-Z0-9_.]+):([a-zA-Z0-9_]+)")


def entrypoint_command(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the command that runs an experiment's entrypoint.

    Args:
        entrypoint: A list is the command itself; ``module:Class`` names a trial class; any other text is for ``sh``.
            ``determined.launch.X`` in any of them becomes ``det_core.launch.X``.
    """
    if not isinstance(entrypoint, str):
        return [_replace_launchers(word) for word in entrypoint]
    if _TRIAL_CLASS.fullmatch(entrypoint):
        return ["python3", "-m", "det_core.launch.torch_distributed", "--", "--trial", entrypoint]
    return ["sh", "-c", _replace_launchers(entrypoint)]


def entrypoint_trial(entrypoint: str | Sequence[str]) -> tuple[str, str] | None:
    """Return module and name of the trial class that an entrypoint runs, or None if it runs none or needs a shell."""
    if isinstance(entrypoint, str) and (match := _TRIAL_CLASS.fullmatch(entrypoint)):
        return match[1], match[2]
    for option, word in pairwise(_split_words(entrypoint)):
        match = _TRIAL_CLASS.fullmatch(word)
        if match and option in ("--trial", "det_core.exec.harness"):
            return match[1], match[2]
    return None


def entrypoint_scripts(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the Python files that an entrypoint names, relative to its directory; none if it needs a shell."""
    if isinstance(entrypoint, str) and re.search(r"[;&|<>$`(){}*?~\\\n]", entrypoint):
        return []
    words = _split_words(entrypoint)
    return [posixpath.normpath(word) for word in words if word.endswith(".py") and word[0] not in "-/"]


def _split_words(entrypoint: str | Sequence[str]) -> Sequence[str]:
    if not isinstance(entrypoint, str):
        return entrypoint
    try:
        return shlex.split(entrypoint)
    except ValueError:
        # A quotation without an end: the shell will report it when the trial starts.
        return ()


def defines_name(source: str, name: str) -> bool:
    """Return whether a module's source defines a name at its top level, as far as can be seen without running it.

    A class, a function, an import or an assignment does; ``import *`` may.
    """
    # By the symbol table alone: importing would run a user's code in the master.
    try:
        module = symtable.symtable(source, "module", "exec")
    except (SyntaxError, ValueError):
        # Maybe of a later Python than this one; the trial's own import decides.
        return True
    if name not in module.get_identifiers():
        return re.search(r"\bimport\s*\*", source) is not None
    symbol = module.lookup(name)
    return symbol.is_assigned() or symbol.is_imported()


def foreign_launchers(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the names of the modules of determined.launch in an entrypoint, each once."""
    words = entrypoint
    if isinstance(entrypoint, str):
        words = [entrypoint]
    return list(dict.fromkeys(name for word in words for name in _DETERMINED_LAUNCHER.findall(word)))


def _replace_launchers(text: str) -> str:
    return _DETERMINED_LAUNCHER.sub(r"det_core.launch.\1", text)
