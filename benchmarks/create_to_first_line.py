"""How long after ``det-core experiment create`` a script's first line runs, beyond ``python script.py``.

Cold: no master runs, and the command starts the embedded one. Warm: it runs already. The script's first line notes the
time, so that what is measured is the command's start, the context's way to the master, its decision, the supervisor's
start and the script's own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._program import options, quick, status
from benchmarks._table import print_table

ROUNDS_COLD, ROUNDS_WARM = quick((7, 15), (1, 1))
BOUND_COLD, BOUND_WARM = 2.0, 0.5
TIMEOUT = 60.0
SCRIPT = "import time; open({note!r}, 'w').write(repr(time.time()))\n"
CONFIG = """\
name: first-line
entrypoint: python script.py
searcher: {name: single, metric: loss, max_length: 1}
max_restarts: 0
"""


class Bench:
    """A home folder, a context with a script and a configuration, and the moment of the script's first line."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "note"
        self._context = folder / "context"
        self._context.mkdir()
        (self._context / "script.py").write_text(SCRIPT.format(note=str(self._note)))
        (folder / "config.yaml").write_text(CONFIG)
        self._folder = folder
        self._environment = {**os.environ, "DET_CORE_HOME": str(folder / "home")}
        self._environment.pop("DET_MASTER", None)

    def bare(self) -> float:
        """Seconds from ``python script.py`` to the first line."""
        return self._timed([sys.executable, "script.py"], self._context)

    def created(self) -> float:
        """Seconds from ``det-core experiment create`` to the first line."""
        command = [str(Path(sys.executable).with_name("det-core")), "experiment"]
        seconds = self._timed([*command, "create", "config.yaml", "context"], self._folder)
        self.run([*command, "wait", "latest"])
        return seconds

    def down(self) -> None:
        """Stop the master."""
        self.run([str(Path(sys.executable).with_name("det-core")), "master", "down"])

    def run(self, command: list[str], folder: Path | None = None) -> None:
        """Run a command to its end."""
        subprocess.run(
            command, cwd=folder, env=self._environment, check=True, capture_output=True, timeout=TIMEOUT
        )  # fmt: skip

    def _timed(self, command: list[str], folder: Path) -> float:
        self._note.unlink(missing_ok=True)
        began = time.time()
        self.run(command, folder)
        while not (self._note.exists() and (text := self._note.read_text())):
            if time.time() - began > TIMEOUT:
                raise RuntimeError("the script has not run")
            time.sleep(0.005)
        return float(text) - began


def main() -> int:
    """Print the table; 1 if a bound is not met."""
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            bench.created()  # fills the caches of bytecode and files
            bare, warm, cold = [], [], []
            for _ in range(ROUNDS_WARM):
                bare.append(bench.bare())
                warm.append(bench.created())
            for _ in range(ROUNDS_COLD):
                bench.down()
                cold.append(bench.created())
        finally:
            bench.down()
    base = statistics.median(bare)
    rows: list[list[object]] = [["python script.py", base, None, None, None, None]]
    missed = False
    for name, seconds, bound in (("embedded master, cold", cold, BOUND_COLD), ("warm", warm, BOUND_WARM)):
        beyond = statistics.median(seconds) - base
        missed |= beyond > bound
        rows.append([name, statistics.median(seconds), max(seconds), beyond, bound, beyond <= bound])
    title = (
        f"experiment create to the script's first line, seconds, median of {ROUNDS_COLD} cold and {ROUNDS_WARM} warm"
    )
    print_table(title, ["what", "s", "worst", "beyond python", "bound", "met"], rows)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(status(main()))
