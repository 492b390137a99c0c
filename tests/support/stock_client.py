"""The contract's own client, as a peer: in virtual environments of its own, run and never read.

``python tests/support/stock_client.py`` makes the environments; what needs them is skipped without.
"""

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
"""What is enough for it (wire contract, §3.4)."""


def folder(release: str) -> Path:
    """Where the environment of a release is."""
    return ROOT / ".venvs" / f"determined-{release}"


def python(release: str) -> Path | None:
    """The interpreter with a release; None if it is not installed."""
    return folder(release) / "bin" / "python" if (folder(release) / ".installed").exists() else None


def install(release: str) -> None:
    """Make the environment of a release.

    Raises:
        subprocess.CalledProcessError: pip could not; its output is on the terminal.
    """
    at = folder(release)
    subprocess.run([sys.executable, "-m", "venv", str(at)], check=True)
    pip = [str(at / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    for wanted in (["--no-deps", f"determined=={release}"], REQUIREMENTS):
        subprocess.run([*pip, *wanted], check=True)
    (at / ".installed").touch()


if __name__ == "__main__":
    for each in RELEASES:
        if python(each) is None:
            install(each)
