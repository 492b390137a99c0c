"""``det-core`` by the function that its script calls, in this process: a process each costs what a hundred calls do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

from det_core.cli import main


def det_core(*arguments: object, check: int | None = 0, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        arguments: its words.
        check: the exit status that it must have; None: any.
        stdin: a descriptor to read answers from, which stays open; by default nothing can be read.
    """
    words = [str(argument) for argument in arguments]
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(bytes_, "utf-8", write_through=True) for bytes_ in written)
    with (
        open(os.devnull if stdin is None else stdin, closefd=stdin is None) as given,
        patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(words)
        except SystemExit as e:
            status = int(e.code or 0)
    said = [stream.getvalue().decode() for stream in written]
    assert check is None or status == check, (status, *said)
    assert "Traceback" not in said[1]
    return subprocess.CompletedProcess(words, status, *said)


class Command:
    """``det-core`` as a function of its words, which returns what it prints.

    Attributes:
        errors: what the last command printed on stderr.
    """

    errors = ""

    def __call__(self, *arguments: object, status: int = 0) -> str:
        """Run a command, which must exit with that status."""
        done = det_core(*arguments, check=status)
        self.errors = done.stderr
        return done.stdout

    def json(self, *arguments: object, status: int = 0) -> Any:
        """Return what a command prints with ``--json``."""
        return json.loads(self(*arguments, "--json", status=status))
