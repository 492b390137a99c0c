"""Record ``docs/picture.svg``: what README's commands print when a person types them. ``make picture`` runs it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from support import ROOT, pages

WIDTH = 100
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {terminal_width} {terminal_height}">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect fill="#0c0c0c" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g transform="translate(9, 9)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own, without its frame and without fonts from elsewhere."""


def main() -> None:
    """Run the commands in a folder of their own, and draw what they print."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        for block in pages.blocks("README.md"):
            if block.name:
                (Path(folder) / block.name).write_text(block.text)
        person = Person(console, Path(folder), home)
        person.types("python fit.py", interrupt=True)
        person.types("DET_CORE_RESUME=latest python fit.py")
        person.types("det-core runs show latest")
        person.types("det-core search preview search.yaml")
        person.types("det-core experiment create search.yaml . --follow", last=4)
        person.types("det-core master down", shown=False)
    console.save_svg(str(ROOT / "docs" / "picture.svg"), theme=MONOKAI, code_format=PICTURE, unique_id="det-core")


class Person:
    """Types commands at a prompt.

    Args:
        console: shows them.
        folder: where.
        home: where all is kept; shown as the platform's folder.
    """

    def __init__(self, console: Console, folder: Path, home: Path) -> None:
        self.console = console
        self.folder = folder
        self.home = home
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "DET_CORE_HOME": str(home), "COLUMNS": str(WIDTH)}

    def types(self, command: str, *, interrupt: bool = False, last: int = 0, shown: bool = True) -> None:
        """Type a command, and press Ctrl-C after some reports if asked to; show all, or its last lines only."""
        # In place of the shell, so that Ctrl-C meets the command; assignments before it are for env then.
        line = f"exec {command}"
        if "=" in command.split()[0]:
            line = f"exec env {command}"
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        said = ""
        if interrupt:
            said = process.stdout.readline()
            while sum(file.read_text().count('"validation"') for file in self.home.glob("runs/*/journal-*")) < 5:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            said += "^C"
        said += process.communicate()[0]
        assert process.returncode == 0, said
        if shown:
            self.console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            lines = said.strip().splitlines()
            if last:
                lines = ["…", *lines[-last:]]
            for line in [*lines, ""]:
                line = line.replace(str(self.home), "~/.local/share/det_core").replace(" ", "\N{NO-BREAK SPACE}")
                self.console.print(Text(line, overflow="fold"))  # as a terminal folds it


if __name__ == "__main__":
    main()
