"""A launcher as a real process, with its output and all processes of its job."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import TESTS
from support.processes import until

TORCH = [sys.executable, "-m", "det_core.launch.torch_distributed"]


class Launched:
    """A running launcher."""

    def __init__(self, command: list[str], folder: Path, env: Mapping[str, str], stdout: int | None) -> None:
        self.job = uuid.uuid4().hex
        self._out, self._err = folder / f"{self.job}.out", folder / f"{self.job}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **env, "TEST_JOB": self.job},
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
                preexec_fn=_as_from_a_shell,
            )
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self._err.read_text(errors="replace")

    @property
    def out_bytes(self) -> bytes:
        """Its stdout so far."""
        return self._out.read_bytes()

    def err_bytes_lines(self) -> list[bytes]:
        """Return the lines of its stderr so far, sorted."""
        return sorted(self._err.read_bytes().splitlines())

    def wait(self) -> int:
        """Wait until it has ended, and return its exit status."""
        return until(lambda: self.process.poll() is not None and [self.process.returncode], self.words)[0]

    def words(self) -> str:
        """Return the end of its output."""
        return f"{self.out[-3000:]}\n{self.err[-3000:]}"

    def wait_for(self, pattern: str, *, times: int = 1) -> list[Any]:
        """Wait until stdout or stderr has ``times`` matches of ``pattern``; return those of ``re.findall``."""

        def look() -> list[Any] | None:
            found = re.findall(pattern, self.out + self.err, re.MULTILINE)
            return found if len(found) >= times else None

        return until(look, lambda: f"{pattern!r} did not come {times} times:\n{self.words()}", of=self.process)

    def processes(self) -> dict[int, str]:
        """Return the command line of every living process of the job, by process ID."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"TEST_JOB={self.job}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def nothing_left(self) -> None:
        """Wait until no process of the job is left."""
        until(lambda: not self.processes(), lambda: f"left behind: {self.processes()}\n{self.words()}")

    def supervisor(self) -> int:
        """Return the process ID of the ranks' parent: the launcher's only child, or its last."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[-1])


@contextmanager
def launched(
    launcher: list[str], *words: str, folder: Path, stdout: int | None = None, **env: str
) -> Iterator[Launched]:
    """Start a launcher in ``folder``; kill it at the end, with which its job ends."""
    job = Launched([*launcher, *words], folder, env, stdout)
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def write(folder: Path, name: str, text: str) -> str:
    """Write a script and return its path."""
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


def short_form(name: str) -> Any:
    """Return a module of ``tests/launchers``, for the long form of its tests."""
    # By path: the package ``launchers`` of the root hides the folder of that name.
    spec = importlib.util.spec_from_file_location(name, TESTS / "launchers" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _as_from_a_shell() -> None:
    """Restore SIGINT: a test runner in the background ignores it, which a launcher would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
