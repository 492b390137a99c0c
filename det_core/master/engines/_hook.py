"""Startup hooks: the context's ``startup-hook.sh`` runs in the script's shell and a virtual environment of its run.

What the hook exports, the script has; what it writes lies in the run's own work directory; what it installs goes to a
virtual environment that is layered on the Python of the trial and deleted with the allocation. Nothing is shared with
other runs, so the hook runs at each start.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from det_core._env import child_environment

HOOK = "startup-hook.sh"
_TIMEOUT = 120.0
_SHELL = f"""
trap 'echo "{HOOK} exited with status $?" >&2' EXIT
source ./{HOOK} || exit
trap - EXIT
exec "$@"
"""
# A virtual environment sees the packages of the Python that it is made of, but where that is one itself, only those of
# the Python below both: the .pth file adds the ones between.
_CREATE = """
import importlib.util, os, site, sys, venv
place = sys.argv[1]
venv.create(place, system_site_packages=True, symlinks=True, with_pip=False)
inside = os.path.join(place, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
if sys.prefix != sys.base_prefix:
    with open(os.path.join(inside, "_layered.pth"), "w") as file:
        file.writelines("import site; site.addsitedir(%r)\\n" % path for path in site.getsitepackages())
if importlib.util.find_spec("pip") is not None:
    for name in ("pip", "pip3"):
        program = os.path.join(place, "bin", name)
        with open(program, "w") as file:
            file.write('#!/bin/sh\\nexec "%s/bin/python" -m pip "$@"\\n' % place)
        os.chmod(program, 0o755)
"""


def hook_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs the hook in the work directory, and then, unless it fails, this command."""
    return ["bash", "-c", _SHELL, HOOK, *command]


def create_venv(place: Path, interpreter: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Create the virtual environment of a run.

    Args:
        place: Directory to create.
        interpreter: Python to layer it on.
        environment: Variables of the run.

    Returns:
        The variables, with the environment first in PATH.

    Raises:
        OSError: If the interpreter cannot be run.
        subprocess.SubprocessError: If it cannot create a virtual environment.
    """
    subprocess.run(
        [interpreter, "-c", _CREATE, str(place)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=_TIMEOUT,
    )
    path = os.pathsep.join([str(place / "bin"), environment.get("PATH", os.defpath)])
    return {**environment, "VIRTUAL_ENV": str(place), "PATH": path}
