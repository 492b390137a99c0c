"""The peers, in a virtual environment of their own beside ours.

Each script names what it needs; the environment is made on first use and grows. It is never imported from: a
peer is run as a child process of its own interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks._program import QUICK

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".venvs" / "peers"
FRAMEWORKS = ROOT / ".venvs" / "frameworks"
PIP_TIMEOUT = 1800.0
"""Seconds that one installation may take: torch is large and a mirror may be slow."""


def peers_python(*requirements: str) -> Path:
    """Return the interpreter of the peers' environment, in which ``requirements`` are installed.

    Args:
        requirements: as pip takes them, pinned where a row of the table names a version
            ("determined==0.38.1"). Everything is installed under the repository's constraints file.

    Raises:
        subprocess.CalledProcessError: pip could not install them; its output is on the terminal.
    """
    from filelock import FileLock

    VENV.parent.mkdir(exist_ok=True)
    python, done = VENV / "bin" / "python", VENV / ".installed"
    with FileLock(str(VENV) + ".lock", timeout=PIP_TIMEOUT):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", VENV], check=True, timeout=PIP_TIMEOUT)
        installed = set(done.read_text().splitlines()) if done.exists() else set()
        if missing := sorted(set(requirements) - installed):
            print(f"installing {' '.join(missing)} into {VENV}", file=sys.stderr, flush=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            pip += ["-c", str(ROOT / "constraints.txt"), *missing]
            subprocess.run(pip, check=True, timeout=PIP_TIMEOUT)
            done.write_text("\n".join(sorted(installed | set(missing))) + "\n")
    return python


def frameworks_python() -> Path | None:
    """Return the interpreter of an environment with horovod, deepspeed and det_core.

    That is ``FRAMEWORKS_VENV``; else one that is made now, which takes minutes the first time. With ``--quick`` none is
    made, and None says that there is none.

    Raises:
        subprocess.CalledProcessError: it could not be made; why is on the terminal.
    """
    venv = Path(os.environ.get("FRAMEWORKS_VENV") or FRAMEWORKS)
    if QUICK:
        return venv / "bin" / "python" if (venv / ".frameworks").exists() else None
    if "FRAMEWORKS_VENV" not in os.environ:
        subprocess.run(["bash", str(ROOT / "tests" / "support" / "frameworks.sh"), venv], check=True)
    return venv / "bin" / "python"
