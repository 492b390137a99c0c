"""Print the reference of the det-core command: ``make docs`` writes it to ``docs/cli.md``, and a test compares it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

WIDTH = "100"


def page(*command: str) -> str:
    """What ``det-core COMMAND --help`` prints."""
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    program = [sys.executable, "-m", "det_core.cli", *command, "--help"]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def subcommands(text: str) -> list[str]:
    """The commands that a page of help lists, one below COMMAND with four spaces before it."""
    return (
        re.findall(r"^    ([a-z][\w-]*)(?:\s|$)", text.split("COMMAND\n", 1)[-1], re.M) if "COMMAND\n" in text else []
    )


def reference() -> str:
    """The whole reference, as Markdown."""
    parts = ["# The det-core command\n\nWritten by `make docs` from each command's `--help`.\n"]
    pages: list[tuple[str, ...]] = [()]
    while pages:
        command = pages.pop(0)
        text = page(*command)
        parts.append(f"## {' '.join(('det-core', *command))}\n\n```text\n{text.rstrip()}\n```\n")
        pages[:0] = [(*command, name) for name in subcommands(text)]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
