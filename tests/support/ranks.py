"""Ranks as real processes, started by hand with the variables that torchrun gives."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PORTS = range(10_000, 18_000)
"""Below those that masters pick from, and those that systems lend to outgoing connections."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody has now, nor is given by chance before it is used."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no free port")


class Ranks:
    """``size`` processes that run one script, each with its output in a file."""

    def __init__(
        self, script: Path, size: int, folder: Path, env: Mapping[str, str], args: tuple[str, ...] = ()
    ) -> None:
        self.outputs = [folder / f"{script.stem}-{rank}.out" for rank in range(size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        port = str(free_port())
        for rank in range(size):
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            with self.outputs[rank].open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(script), *args],
                        env={**os.environ, **variables, **env},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, rank: int) -> str:
        """What ``rank`` has printed so far."""
        return self.outputs[rank].read_text(errors="replace")

    def wait_for(self, text: str, *, times: int = 1, ranks: list[int] | None = None, timeout: float = 60) -> None:
        """Wait until each of ``ranks`` has printed ``text`` so often."""
        deadline = time.monotonic() + timeout
        for rank in ranks if ranks is not None else range(len(self.processes)):
            while self.output(rank).count(text) < times:
                if time.monotonic() > deadline or self.processes[rank].poll() not in (None, 0):
                    raise AssertionError(
                        f"rank {rank} did not print {text!r} {times} times: {self.output(rank)[-2000:]}"
                    )
                time.sleep(0.005)

    def wait(self, timeout: float = 60) -> list[int]:
        """The exit status of every rank."""
        deadline = time.monotonic() + timeout
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]


@contextmanager
def running(
    code: str, size: int, folder: Path, *, env: Mapping[str, str] | None = None, args: tuple[str, ...] = ()
) -> Iterator[Ranks]:
    """Start ``code`` as a script on ``size`` ranks; whatever still runs at the end is killed."""
    script = folder / f"script-{time.monotonic_ns()}.py"
    script.write_text(textwrap.dedent(code))
    ranks = Ranks(script, size, folder, env or {}, args)
    try:
        yield ranks
    finally:
        for p in ranks.processes:
            if p.poll() is None:
                p.kill()
            p.wait()
