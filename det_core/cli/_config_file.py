"""The file with an experiment's configuration, as commands take it: whether it is there, and its mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from det_core.cli._say import error


def is_there(path: str, *, folder: bool = False) -> bool:
    """Whether there is such a file (or folder) for a command to read; if not, that is told."""
    what = "folder" if folder else "file"
    if Path(path).is_dir() if folder else Path(path).is_file():
        return True
    error(f"{path} is no {what}" if Path(path).exists() else f"there is no {what} {path}")
    return False


def tell_mistakes(problems: Iterable[object], path: object) -> None:
    """Tell the mistakes in a configuration, a line for each; one of the whole file names it if ``path`` is a path."""
    for problem in problems:
        text = str(problem)
        if isinstance(path, str) and text.startswith("the experiment file:"):
            text = path + text.removeprefix("the experiment file")
        error(text)
