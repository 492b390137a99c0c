"""The contract's own client, as a peer: in virtual environments of its own, run and never read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import ROOT

RELEASES = ("0.37.0", "0.38.1")
REQUIREMENTS = [
    *("requests<2.32", "numpy", "psutil", "pyzmq", "certifi", "filelock", "ruamel.yaml", "appdirs", "packaging"),
    *("tqdm", "pathspec", "termcolor", "lomond", "pytz", "python-dateutil", "gitpython", "tabulate", "docker"),
    "analytics-python",
]
"""Packages that suffice for the client (wire contract, §3.4)."""


def python(release: str) -> Path:
    """Return the interpreter with a release, which is installed at its first use.

    Raises:
        subprocess.CalledProcessError: pip could not; its output is on the terminal.
    """
    at = ROOT / ".venvs" / f"determined-{release}"
    if not (at / ".installed").exists():
        install(release, at)
    return at / "bin" / "python"


def install(release: str, at: Path) -> None:
    """Make the environment of a release."""
    subprocess.run([sys.executable, "-m", "venv", str(at)], check=True)
    pip = [str(at / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    for wanted in (["--no-deps", f"determined=={release}"], REQUIREMENTS):
        subprocess.run([*pip, *wanted], check=True)
    (at / ".installed").touch()
