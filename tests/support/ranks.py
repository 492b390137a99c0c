"""Ranks as real processes, started by hand with the variables that torchrun gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from support import TESTS, warm
from support.processes import free_port, until


class Ranks:
    """``size`` processes that run one script, each with its output in a file.

    Args:
        script: what they run.
        size: how many.
        folder: for the outputs.
        env: variables for all of them.
        args: words after the script.
        cold: start each as an interpreter of its own, instead of forking it from a process that has torch.
        kind: the process that they are forked from.
    """

    def __init__(
        self,
        script: Path,
        size: int,
        folder: Path,
        env: Mapping[str, str],
        args: tuple[str, ...] = (),
        *,
        cold: bool = False,
        kind: warm.Kind = warm.HERE,
    ) -> None:
        self.outputs = [folder / f"{script.stem}-{rank}.out" for rank in range(size)]
        self.processes: list[warm.Started | subprocess.Popen[bytes]] = []
        for rank, variables in enumerate(_variables(size)):
            everything = {**os.environ, **variables, **env}
            with self.outputs[rank].open("wb") as out:
                if cold:
                    command = [sys.executable, "-u", str(script), *args]
                    self.processes.append(subprocess.Popen(command, env=everything, stdout=out, stderr=out))
                else:
                    self.processes.append(warm.start([script, *args], env=everything, stdout=out.fileno(), kind=kind))

    def output(self, rank: int) -> str:
        """Return the output of ``rank`` so far."""
        return self.outputs[rank].read_text(errors="replace")

    def wait_for(self, text: str, *, times: int = 1, ranks: list[int] | None = None) -> None:
        """Wait until each of ``ranks`` has printed ``text`` so often; it may end with success meanwhile."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            until(
                lambda r=rank: self.output(r).count(text) >= times,
                self.outputs[rank].read_text,
                of=self.processes[rank],
            )

    def wait(self) -> list[int]:
        """Wait for all ranks and return their exit statuses."""
        return [p.wait() for p in self.processes]


def _variables(size: int) -> list[dict[str, str]]:
    """Return torchrun's variables for each of ``size`` ranks."""
    alike = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [{**alike, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class Job:
    """Warm ranks of one script, with the face of the launcher that they stand in for where it is not the subject.

    The first that fails ends the others, at the next look.

    Args:
        argv: the script and its arguments.
        size: how many.
        env: all variables, but for those of a launcher.
        cwd: the working directory.
        stdout: a descriptor for the output of all of them.
        kind: the process that they are forked from.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        size: int,
        *,
        env: Mapping[str, str],
        cwd: Path | str,
        stdout: int,
        kind: warm.Kind = warm.HERE,
    ) -> None:
        self._ranks = [
            warm.start(argv, env={**env, **variables}, cwd=cwd, stdout=stdout, kind=kind)
            for variables in _variables(size)
        ]
        self.pid = self._ranks[0].pid
        self._failed = 0

    def poll(self) -> int | None:
        """Return the status of the first that failed, or 0, once all have ended; None before."""
        statuses = [rank.poll() for rank in self._ranks]
        self._failed = self._failed or next(filter(None, statuses), 0)
        if self._failed:
            for rank in self._ranks:
                rank.kill()
        return None if None in statuses else self._failed

    def wait(self) -> int:
        """Wait for all and return that status."""
        until(lambda: self.poll() is not None)
        return self._failed

    def send_signal(self, number: int) -> None:
        """Send all of them a signal."""
        for rank in self._ranks:
            rank.send_signal(number)


def watched(
    argv: Sequence[str | Path],
    size: int | None = None,
    *,
    env: Mapping[str, str],
    cwd: Path | str = ".",
    at: str | None = None,
    number: int = signal.SIGTERM,
    kind: warm.Kind = warm.HERE,
) -> str:
    """Run a warm script to its end, which must be a good one; what it printed.

    Args:
        argv: the script and its arguments.
        size: how many ranks; left out, a process without a launcher's variables.
        env: all variables.
        cwd: the working directory.
        at: words; the rank that prints them first sends itself a signal.
        number: the signal.
        kind: the process that they are forked from.
    """
    before = [TESTS / "support" / "interrupted.py", at, str(int(number))] if at is not None else []
    start = warm.start if size is None else partial(Job, size=size)
    with tempfile.TemporaryFile() as output:
        job = start([*before, *argv], env={**env, "OMP_NUM_THREADS": "1"}, cwd=cwd, stdout=output.fileno(), kind=kind)
        status = job.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    assert status == 0, printed
    return printed


@contextmanager
def running(
    code: str,
    size: int,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    args: tuple[str, ...] = (),
    cold: bool = False,
    kind: warm.Kind = warm.HERE,
) -> Iterator[Ranks]:
    """Start ``code`` as a script on ``size`` ranks; whatever still runs at the end is killed."""
    script = folder / f"script-{time.monotonic_ns()}.py"
    script.write_text(textwrap.dedent(code))
    ranks = Ranks(script, size, folder, env or {}, args, cold=cold, kind=kind)
    try:
        yield ranks
    finally:
        for p in ranks.processes:
            p.kill()
            p.wait()
