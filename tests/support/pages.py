"""Pages of Markdown as programs: their blocks of code and shell, run in order, in one folder and one shell.

A block that begins with ``# NAME.py`` (or another ending) is a file of that name, for the commands after it. Other
blocks of Python are scripts. One with ``<!-- not run: WHY -->`` before it is left out; of other languages all are.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support import ROOT, warm

_BLOCK = re.compile(r"(?:^ *<!-- not run: ([^\n]*) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.M | re.S)
_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml|json|sh))\n")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        place: page and line.
        language: what stands after the backticks.
        text: without the indentation of the block.
        name: that of the file that it is, if it is one.
        why_not_run: what the page says; None: it is run.
    """

    place: str
    language: str
    text: str
    name: str | None
    why_not_run: str | None


def page(name: str) -> str:
    """Return the text of a page, by its path in the repository."""
    return (ROOT / name).read_text()


def blocks(name: str) -> list[Block]:
    """Return the blocks of a page, by its path in the repository, in order."""
    text, found = page(name), []
    for match in _BLOCK.finditer(text):
        why, indent, language, code = match.groups()
        code = re.sub(f"^{indent}", "", code, flags=re.M)
        named = _NAME.match(code)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(f"{name}:{line}", language, code, named[1] if named else None, why))
    return found


def block(name: str, file: str) -> str:
    """Return the block of a page that is a file of this name."""
    (found,) = [each.text for each in blocks(name) if each.name == file]
    return found


def program(found: list[Block]) -> str:
    """Return the blocks as one shell script that stops at the first command that fails."""
    lines = ["set -e"]
    for number, each in enumerate(found):
        if each.why_not_run is not None or (each.language not in ("python", "sh") and each.name is None):
            continue
        lines.append(f"echo '=== {each.place}'")
        if each.language == "sh":
            lines.append(each.text)
            continue
        file = each.name or f"block{number}.py"
        lines.append(f"printf %s {shlex.quote(each.text)} > {file}")
        if each.name is None:
            lines.append(f"python {file}")
    return "\n".join(lines) + "\n"


def play(found: list[Block], folder: Path, python: Path | None = None, **variables: str) -> str:
    """Run the blocks in a folder; what they have printed.

    Args:
        found: the blocks.
        folder: where.
        python: the interpreter of the environment whose commands they use. Left out: this one's, and ``python`` and
            ``det-core`` are warm; the ranks, masters and trials that they start are as ever.
        variables: beside those of this process.
    """
    if python is None:
        commands, python = folder / "bin", Path(sys.executable)
        commands.mkdir(exist_ok=True)
        for name, before in {"python": [], "det-core": ["-m", "det_core.cli"]}.items():
            warm.add_command(commands / name, before)
        search = f"{commands}:{python.parent}:{os.environ['PATH']}"
    else:
        search = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", program(found)], cwd=folder, env={**os.environ, "PATH": search, **variables},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"status {done.returncode} after:\n{done.stdout}"
    return done.stdout
