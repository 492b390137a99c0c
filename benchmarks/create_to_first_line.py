"""Delay from ``det-core experiment create`` to a script's first line, beyond ``python script.py``.

Cold: no master runs, and the command starts the embedded one. Warm: it runs already. Measured are the command's start,
the context's way to the master, its decision, the supervisor's start and the script's own.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._bench import Args, Table, Tables, at_most, program
from benchmarks._master import until
from benchmarks._processes import HANGS, environment

COLD = 2.0
WARM = 0.5
"""Bounds: seconds beyond python."""
CONFIG = """\
name: first-line
entrypoint: python script.py
searcher: {name: single, metric: loss, max_length: 1}
max_restarts: 0
"""
DET_CORE = str(Path(sys.executable).with_name("det-core"))


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = Path(name, "context")
        note = Path(name, "note")
        context.mkdir()
        (context / "script.py").write_text(f"import time; open({str(note)!r}, 'w').write(repr(time.time()))\n")
        (folder / "config.yaml").write_text(CONFIG)

        def run(*command: str, cwd: Path = folder) -> None:
            env = environment(folder / "home")
            subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, timeout=HANGS)

        def first_line(*command: str, cwd: Path = folder) -> float:
            note.unlink(missing_ok=True)
            # The wall clock, as the script reads it in another process.
            began = time.time()
            run(*command, cwd=cwd)
            # The file is there before its text is.
            return float(until(lambda: note.exists() and note.read_text())) - began

        def created() -> float:
            seconds = first_line(DET_CORE, "experiment", "create", "config.yaml", "context")
            # Outside the time: the end of a trial would take processors from the start of the next.
            run(DET_CORE, "experiment", "wait", "latest")
            return seconds

        bare = []
        warm = []
        cold = []
        try:
            created()  # fills the caches of bytecode and files
            for _ in range(args.rounds):
                bare.append(first_line(sys.executable, "script.py", cwd=context))
                warm.append(created())
            for _ in range(-(-args.rounds // 2)):
                run(DET_CORE, "master", "down")
                cold.append(created())
        finally:
            run(DET_CORE, "master", "down")
    base = statistics.median(bare)
    title = f"experiment create to the script's first line, s, median of {len(cold)} cold and {len(warm)} warm"
    table = Table(title, ["s", "worst", "beyond python"])
    table.row("python script.py", base, max(bare))
    for name, seconds, bound in (("embedded master, cold", cold, COLD), ("warm", warm, WARM)):
        beyond = statistics.median(seconds) - base
        table.row(name, beyond + base, max(seconds), beyond, bound=at_most(beyond, bound))
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=15)
