"""Somebody who types ``det-core`` commands in a folder; the master that starts by itself, and all that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.commands import det_core
from support.leftovers import processes_of
from support.processes import until


class Person:
    """Types commands.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # where this environment's det-core is
        self.environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}

    def types(self, *words: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which must have this status."""
        environment = {**self.environment, **variables}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def reads(self, *words: str) -> Any:
        """Return the output of a command with ``--json``.

        It runs in this process, since some tests ask again and again.
        """
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            with patch.dict(os.environ, self.environment):
                return json.loads(det_core(*words, "--json").stdout)
        finally:
            os.chdir(here)

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def watches(self, text: str) -> None:
        """Follow what the last experiment prints until it has a line with this text."""
        with self.begins("det-core", "experiment", "logs", "latest", "--follow") as following:
            assert following.stdout is not None
            seen = any(text in line for line in following.stdout)
            following.kill()
        assert seen, text

    def leaves(self) -> None:
        """Kill what still runs, and stop the master; nothing of it stays."""
        home = Path(self.environment["DET_CORE_HOME"])
        if processes_of(home):
            for experiment in self.reads("experiment", "list"):
                if experiment["end_time"] is None:
                    for verb in ("kill", "wait"):  # it may just have ended by itself, so with any status
                        self.begins("det-core", "experiment", verb, str(experiment["id"])).communicate()
            self.types("det-core", "master", "down")
        until(lambda: not processes_of(home))
