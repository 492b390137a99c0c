"""Processes to measure in: this tree's, another commit's and the peers', each with a fresh home.

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
DETERMINED, TORCH = "determined==0.38.1", "torch==2.13.0"
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
"""What every snippet begins with. ``context()`` is that of its ranks, by determined or by who takes over its API."""


def answer(
    code: str | Path,
    *arguments: object,
    python: Path | str = sys.executable,
    tree: Path = ROOT,
    ranks: int = 1,
    launcher: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run a snippet as one process or several, in an empty folder; what one of them passed to ``answer()``.

    Args:
        code: what follows :data:`HEAD`; or a file, which writes its JSON to ``BENCH_ANSWER`` itself.
        arguments: its ``sys.argv[1:]``.
        python: whose packages it sees; but ``det_core`` and ``benchmarks`` are those of ``tree``.
        ranks: how many processes run it; each has its ``RANK`` of ``SIZE``.
        launcher: words between interpreter and script.

    Raises:
        RuntimeError: one failed, or hung. All others were killed; the message ends with what they said.
    """
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as name:
        folder = Path(name)
        work, script, result = folder / "work", folder / "script.py", folder / "answer"
        work.mkdir()
        if isinstance(code, Path):
            script = code
        else:
            script.write_text(HEAD + code)
        command = [str(word) for word in (python, *launcher, script, *arguments)]
        given = environment(folder / "home", tree) | {"BENCH_ANSWER": str(result), "BENCH_SIZE": str(ranks)}
        given |= {"BENCH_PORT": str(two_free_ports()), "OMP_NUM_THREADS": "1", **(env or {})}
        with open(folder / "said", "w+b") as said:
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
    """Wait until all have ended; or until one fails or all hang, and then kill them. The status of who failed."""
    deadline = time.monotonic() + HANGS
    try:
        while None in [process.poll() for process in processes]:
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
    """Variables for a process that sees a tree's packages, and none of the user's settings of ours and of Python's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DET_", "PYTHON"))}
    return {**kept, "DET_CORE_HOME": str(home), "PYTHONPATH": str(tree)}


def two_free_ports() -> int:
    """A free port of 127.0.0.1 whose successor is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            two.bind(("127.0.0.1", port + 1))
            return port


def trees(against: str | None) -> dict[str, Path]:
    """The trees to measure: this one, and of the commit that ``--against`` names a git worktree below ``.venvs``."""
    found = {OURS: ROOT}
    if against:
        name = ["git", "rev-parse", "--short", f"{against}^{{commit}}"]
        commit = subprocess.run(name, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        folder = found[f"{OURS} at {commit}"] = VENVS / "against" / commit
        if not folder.exists():
            add = ["git", "worktree", "add", "--force", "--detach", str(folder), commit]
            subprocess.run(add, cwd=ROOT, check=True, stdout=sys.stderr)
    return found


def ours(args: Args, code: str, *arguments: object, **options: Any) -> dict[str, Callable[[], Any]]:
    """A contender for each tree: that one's :func:`answer`."""
    return {name: functools.partial(answer, code, *arguments, tree=tree, **options)
            for name, tree in trees(args.against).items()}  # fmt: skip


def peers(*requirements: str) -> Path:
    """The interpreter of the peers' environment, with these requirements installed under the constraints file."""
    from filelock import FileLock

    venv = VENVS / "peers"
    python, done = venv / "bin" / "python", venv / ".installed"
    VENVS.mkdir(exist_ok=True)
    with FileLock(f"{venv}.lock", timeout=HANGS):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=HANGS)
        installed = set(done.read_text().split()) if done.exists() else set()
        if missing := sorted(set(requirements) - installed):
            print(f"installing {' '.join(missing)} into {venv}", file=sys.stderr, flush=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *missing], check=True, timeout=HANGS)
            done.write_text("\n".join(sorted(installed | set(missing))) + "\n")
    return python


def frameworks() -> Path | None:
    """The interpreter of an environment with horovod and deepspeed, made in minutes unless ``FRAMEWORKS_VENV`` is one.
    None: with ``--quick`` none is made."""
    given = os.environ.get("FRAMEWORKS_VENV")
    venv = Path(given or VENVS / "frameworks")
    return venv / "bin" / "python" if given and not QUICK else _made_by("frameworks", venv)


def timm() -> Path | None:
    """The interpreter of the environment that ``make test-timm`` makes; None: with ``--quick`` none is made."""
    return _made_by("timm", VENVS / "timm", sys.prefix)


def _made_by(name: str, venv: Path, *arguments: str) -> Path | None:
    if not QUICK:
        script = ROOT / "tests" / "support" / f"{name}.sh"
        subprocess.run(["bash", script, venv, *arguments], check=True, timeout=HANGS, stdout=sys.stderr)
    return venv / "bin" / "python" if (venv / f".{name}").exists() else None
