"""Variables that were handed to this machine in a file, because a command line is no place for them."""

from __future__ import annotations

import os
from collections.abc import Mapping

NAME = "variables"
"""The file's name."""


def to_bytes(variables: Mapping[str, str]) -> bytes:
    """The content of the file: NAME=VALUE, each with a NUL at its end, as in ``/proc/PID/environ``."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())


def place_elsewhere(folder: str) -> str:
    """Where things of the launcher with this folder lie on this machine, if the launcher is on another one.

    Machines may share a file system, so this is another name than the launcher's own folder has.
    """
    return f"/tmp/{os.path.basename(folder)}.{os.uname().nodename}"


def handed(folder: str) -> dict[str, str]:
    """What was handed over; nothing where there is no such file.

    Raises:
        PermissionError: the file is another user's.
    """
    try:
        with open(os.path.join(folder, NAME), "rb") as file:
            if os.fstat(file.fileno()).st_uid not in (0, os.geteuid()):
                raise PermissionError(f"{folder} is another user's")
            lines = file.read().split(b"\0")
    except FileNotFoundError:
        return {}
    return dict(os.fsdecode(line).split("=", 1) for line in lines if line)
