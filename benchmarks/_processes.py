"""Processes to measure in: of this tree, of another commit and of peers, each with a fresh home.

Each peer runs by the interpreter of an environment below ``.venvs``, which is made and filled at its first use.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._bench import OURS, QUICK, Args

ROOT = Path(__file__).parent.parent
VENVS = ROOT / ".venvs"
DETERMINED = "determined==0.38.1"
TORCH = "torch==2.13.0"
HANGS = 1800.0  # seconds
HEAD = """\
import json, os, sys, time
RANK, SIZE, PORT = (int(os.environ[name]) for name in ("BENCH_RANK", "BENCH_SIZE", "BENCH_PORT"))
def answer(value):
    with open(os.environ["BENCH_ANSWER"], "w") as file:
        json.dump(value, file)
def context(core):
    numbers = {"rank": RANK, "size": SIZE, "local_rank": RANK, "local_size": SIZE, "cross_rank": 0, "cross_size": 1}
    return core.DistributedContext(**numbers, pub_port=PORT, pull_port=PORT + 1)
"""
"""Head of every snippet. ``context()`` returns the ranks' context, of determined or of a package with its API."""


def answer(
    code: str | Path,
    *arguments: object,
    python: Path | str = sys.executable,
    tree: Path = ROOT,
    ranks: int = 1,
    launcher: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run a snippet in one process or several, in an empty directory, and return what one passed to ``answer()``.

    Args:
        code: Text behind :data:`HEAD`; or a file, which writes its JSON to ``BENCH_ANSWER`` itself.
        arguments: Its ``sys.argv[1:]``.
        python: Interpreter whose packages it imports, except ``det_core`` and ``benchmarks`` of ``tree``.
        ranks: Number of processes; each has its ``RANK`` of ``SIZE``.
        launcher: Words between interpreter and script.

    Raises:
        RuntimeError: If one failed, or hung. All others were killed; the message ends with their output.
    """
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as name:
        folder = Path(name)
        work = folder / "work"
        script = folder / "script.py"
        result = folder / "answer"
        work.mkdir()
        if isinstance(code, Path):
            script = code
        else:
            script.write_text(HEAD + code)
        command = [str(word) for word in (python, *launcher, script, *arguments)]
        given = environment(folder / "home", tree) | {"BENCH_ANSWER": str(result), "BENCH_SIZE": str(ranks)}
        # torch starts a thread for each core, and those of several ranks would fight for the cores.
        given |= {"BENCH_PORT": str(two_free_ports()), "OMP_NUM_THREADS": "1", **(env or {})}
        # A file, as nobody reads while the processes run, and a full pipe would block them.
        with open(folder / "said", "w+b") as said:
            # Sessions of their own, so that a kill of the group also meets what a rank has started.
            started = [
                subprocess.Popen(command, cwd=work, env={**given, "BENCH_RANK": str(rank)}, stdout=said, stderr=said,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
                for rank in range(ranks)
            ]  # fmt: skip
            failed = wait_for(started)
        if failed is not None or not result.exists():
            text = (folder / "said").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {failed}, or did not answer:\n{text}")
        return json.loads(result.read_text())


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, and return the status of one that failed, or None; kill the rest then or at a hang."""
    deadline = time.monotonic() + HANGS
    try:
        while None in [process.poll() for process in processes]:
            # The others may wait for the failed one for ever.
            if any(process.returncode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        statuses = [process.returncode for process in processes]
        return next(filter(None, statuses), signal.SIGKILL if None in statuses else None)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(home: Path, tree: Path = ROOT) -> dict[str, str]:
    """Return variables for a process that imports from a tree, without the user's settings of det_core and Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DET_", "PYTHON"))}
    return {**kept, "DET_CORE_HOME": str(home), "PYTHONPATH": str(tree)}


def two_free_ports() -> int:
    """Return a free port of 127.0.0.1 whose successor is free, too."""
    while True:
        # bind() raises OverflowError for the successor of 65,535.
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            two.bind(("127.0.0.1", port + 1))
            return port


def trees(against: str | None) -> dict[str, Path]:
    """Return the trees to measure: this one, and a git worktree below ``.venvs`` of the commit of ``--against``."""
    found = {OURS: ROOT}
    if against:
        name = ["git", "rev-parse", "--short", f"{against}^{{commit}}"]
        commit = subprocess.run(name, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        folder = found[f"{OURS} at {commit}"] = VENVS / "against" / commit
        if not folder.exists():
            # Forced: git refuses a folder that it knows as a worktree's, also if it was deleted with .venvs.
            add = ["git", "worktree", "add", "--force", "--detach", str(folder), commit]
            # Standard output is for the tables, or lines of JSON, alone.
            subprocess.run(add, cwd=ROOT, check=True, stdout=sys.stderr)
    return found


def ours(args: Args, code: str, *arguments: object, **options: Any) -> dict[str, Callable[[], Any]]:
    """Return a contender for each tree: its :func:`answer`."""
    return {name: functools.partial(answer, code, *arguments, tree=tree, **options)
            for name, tree in trees(args.against).items()}  # fmt: skip


def peers(*requirements: str) -> Path:
    """Return the interpreter of the peers' environment, with requirements installed under the constraints file."""
    from filelock import FileLock

    venv = VENVS / "peers"
    python = venv / "bin" / "python"
    done = venv / ".installed"
    VENVS.mkdir(exist_ok=True)
    # pip does not lock what it installs into, and benchmarks may run side by side.
    with FileLock(f"{venv}.lock", timeout=HANGS):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=HANGS)
        if done.exists():
            installed = set(done.read_text().split())
        else:
            installed = set()
        if missing := sorted(set(requirements) - installed):
            print(f"installing {' '.join(missing)} into {venv}", file=sys.stderr, flush=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *missing], check=True, timeout=HANGS)
            # Last, so that an interrupted installation is made again.
            done.write_text("\n".join(sorted(installed | set(missing))) + "\n")
    return python


def frameworks() -> Path | None:
    """Return the interpreter of an environment with horovod and deepspeed, or None: ``--quick`` makes none.

    Making it takes minutes, unless ``FRAMEWORKS_VENV`` names one.
    """
    given = os.environ.get("FRAMEWORKS_VENV")
    venv = Path(given or VENVS / "frameworks")
    if given and not QUICK:
        return venv / "bin" / "python"
    return _made_by("frameworks", venv)


def timm() -> Path | None:
    """Return the interpreter of the environment of ``make test-timm``, or None: ``--quick`` makes none."""
    return _made_by("timm", VENVS / "timm", sys.prefix)


def _made_by(name: str, venv: Path, *arguments: str) -> Path | None:
    if not QUICK:
        script = ROOT / "tests" / "support" / f"{name}.sh"
        subprocess.run(["bash", script, venv, *arguments], check=True, timeout=HANGS, stdout=sys.stderr)
    if (venv / f".{name}").exists():
        return venv / "bin" / "python"
    return None
