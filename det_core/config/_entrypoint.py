"""What an experiment runs: from its ``entrypoint`` to the command (wire contract, sections 3.3 and 14)."""

from __future__ import annotations

import re
from collections.abc import Sequence

LAUNCHERS = ("torch_distributed",)
"""The modules of det_core.launch that stand in for foreign ones of the same name."""
_FOREIGN = re.compile(r"(?<![\w.])determined\.launch\.(\w+)")
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


def foreign_launchers(entrypoint: str | Sequence[str]) -> list[str]:
    """The names of the foreign launch modules in it, each once."""
    words = [entrypoint] if isinstance(entrypoint, str) else entrypoint
    return list(dict.fromkeys(name for word in words for name in _FOREIGN.findall(word)))


def _ours(text: str) -> str:
    return _FOREIGN.sub(r"det_core.launch.\1", text)
