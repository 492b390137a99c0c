"""What an experiment runs: from its ``entrypoint`` to the command (wire contract, sections 3.3 and 14)."""

from __future__ import annotations

import posixpath
import re
import shlex
import symtable
from collections.abc import Sequence
from itertools import pairwise

LAUNCHERS = ("torch_distributed", "deepspeed", "horovod", "tensorflow", "wrap_rank")
"""The modules of det_core.launch that stand in for foreign ones of the same name."""
_FOREIGN = re.compile(r"(?<![\w.])determined\.launch\.(\w+)")
_TRIAL_CLASS = re.compile(r"([a-zA-Z0-9_.]+):([a-zA-Z0-9_]+)")


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
    if isinstance(entrypoint, str) and (alone := _TRIAL_CLASS.fullmatch(entrypoint)):
        return alone[1], alone[2]
    try:
        words = shlex.split(entrypoint) if isinstance(entrypoint, str) else entrypoint
    except ValueError:  # a quotation that does not end: the shell will say so
        return None
    for option, word in pairwise(words):
        found = _TRIAL_CLASS.fullmatch(word)
        if found and option in ("--trial", "det_core.exec.harness"):
            return found[1], found[2]
    return None


def entrypoint_scripts(entrypoint: str | Sequence[str]) -> list[str]:
    """The Python files that an entrypoint names, relative to its folder; none where only a shell could tell."""
    if isinstance(entrypoint, str) and re.search(r"[;&|<>$`(){}*?~\\\n]", entrypoint):
        return []
    try:
        words = shlex.split(entrypoint) if isinstance(entrypoint, str) else entrypoint
    except ValueError:  # a quotation that does not end: the shell will say so
        return []
    return [posixpath.normpath(word) for word in words if word.endswith(".py") and word[0] not in "-/"]


def defines_name(source: str, name: str) -> bool:
    """Whether a module's source binds a name at its top level, as far as can be seen without running it.

    A class, a function, an import or an assignment does; ``import *`` may. Source that cannot be read counts as well:
    importing it will tell.
    """
    try:
        module = symtable.symtable(source, "module", "exec")
    except (SyntaxError, ValueError):
        return True
    if name not in module.get_identifiers():
        return re.search(r"\bimport\s*\*", source) is not None
    symbol = module.lookup(name)
    return symbol.is_assigned() or symbol.is_imported()


def foreign_launchers(entrypoint: str | Sequence[str]) -> list[str]:
    """The names of the foreign launch modules in it, each once."""
    words = [entrypoint] if isinstance(entrypoint, str) else entrypoint
    return list(dict.fromkeys(name for word in words for name in _FOREIGN.findall(word)))


def _ours(text: str) -> str:
    return _FOREIGN.sub(r"det_core.launch.\1", text)
