"""What stands on a command line after the options: which command it means."""

from __future__ import annotations

import os
import re
import shutil
import sys

from ._options import UsageError

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")


def script_command(script: str, arguments: list[str], *, module: bool = False, no_python: bool = False) -> list[str]:
    """The command that each rank runs.

    ``python script.py …`` runs as it stands, with the python that the shell would take. Otherwise a ``.py`` file, or
    any other file that is not executable, runs under the python that runs the launcher, as under ``torchrun``, and an
    executable runs as a command. ``--trial module:Class …`` runs that class, with the options of the harness after it.

    Args:
        script: the first word after the options.
        arguments: the words after it.
        module: ``script`` is the name of a module (``-m``).
        no_python: run ``script`` as a command whatever it is.

    Raises:
        UsageError: there is no such script or command.
    """
    if script == "--trial":
        if not arguments:
            raise UsageError("--trial: expected MODULE:CLASS, as in --trial model_def:MyTrial")
        return [sys.executable, "-m", "det_core.exec.harness", *arguments]
    if module and no_python:
        raise UsageError("-m runs a module with python and --no-python runs a command: give one of them")
    if module:
        return [sys.executable, "-m", script, *arguments]
    if no_python:
        return [_find(script), *arguments]
    if _PYTHON.fullmatch(os.path.basename(script)):
        if arguments and not arguments[0].startswith("-"):
            _must_exist(arguments[0])
        return [_find(script), *arguments]
    if os.path.isfile(script) and os.access(script, os.X_OK) and not script.endswith(".py"):
        return [os.path.abspath(script), *arguments]
    if (
        not os.path.exists(script)
        and "/" not in script
        and not script.endswith(".py")
        and (found := shutil.which(script))
    ):
        return [found, *arguments]
    _must_exist(script)
    return [sys.executable, script, *arguments]


def _must_exist(script: str) -> None:
    if not os.path.exists(script):
        raise UsageError(f"the script {script} does not exist (working directory: {os.getcwd()})")


def _find(command: str) -> str:
    if found := shutil.which(command):
        return found
    hint = f"; this launcher's own is {sys.executable}" if command.startswith("python") else ""
    raise UsageError(f"the command {command} was not found{' on PATH' if '/' not in command else ''}{hint}")
