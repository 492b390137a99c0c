"""A chain of Slurm jobs beside the same script by hand: until its first line, and between two jobs; its lines of code.

Slurm's own daemons run on two hosts in network namespaces, so this needs root, as tests/slurm does. By hand: sbatch of
the script, and two such jobs of which the second depends on the first.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._bench import OURS, Args, Table, Tables, at_most, program
from benchmarks._processes import ROOT
from benchmarks._turns import alternate, median

sys.path.insert(0, str(ROOT / "tests"))
from support.hosts import Hosts
from support.slurm import Slurm

SUBMIT_BOUND = 1.0
NEXT_BOUND = 3.0
SETTLE_DELAY = 4.0
"""Seconds before a submit, as the scheduler pauses for two after each event, such as the end of the measure before."""
LINES_BOUND = 750
LINES_OF_TESTS_BOUND = 600
SCRIPT = """import time; now = time.time()
import os, signal, sys
with open("starts", "a") as f:
    f.write(f"{now}\\n")
if sys.argv[1] == "stop" and len(open("starts").readlines()) == 1:
    signal.signal(signal.SIGTERM, lambda *_: None)
    if sys.argv[2] == "chain":
        signal.pause()
    open("end", "w").write(str(time.time()))
"""
HAND = "#!/bin/sh\n#SBATCH --ntasks=1\nexec {python} script.py {mode} hand\n"


class Bench:
    """A cluster and what to submit to it."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DET_CORE_HOME": str(folder / "home"),
        }

    def measure(self, mode: str, ours: bool) -> dict[str, float]:
        """Return the seconds from the submit to the first line, or with ``stop`` from the end of a job to the next."""
        for name in ("starts", "end"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "script.py").write_text(SCRIPT)
        (self.folder / "hand.sh").write_text(HAND.format(python=sys.executable, mode=mode))
        time.sleep(SETTLE_DELAY)
        began = time.time()
        if ours:
            self._run("det-core", "slurm", "submit", "--time", "5", "--", "python", "script.py", mode, "chain")
        else:
            job = self._run("sbatch", "--parsable", "hand.sh").strip()
            if mode == "stop":
                self._run("sbatch", f"--dependency=afterany:{job}", "hand.sh")
        first = self._starts(1)
        if mode == "start":
            self._wait_for_queue()
            return {"s": first - began}
        if ours:  # as at a preemption: the next job goes on
            time.sleep(2)  # the next one is queued by then
            self._run("scancel", "--batch", "--signal=USR1", self._running())
        second = self._starts(2)
        self._wait_for_queue()
        return {"s": second - float((self.folder / "end").read_text())}

    def _run(self, *command: str) -> str:
        words = [*self.slurm.on(1), *(f"{k}={v}" for k, v in self.env.items()), *command]
        return subprocess.run(words, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True).stdout

    def _running(self) -> str:
        return self._run("squeue", "-h", "-t", "R", "-o", "%i").strip()

    def _starts(self, count: int) -> float:
        path = self.folder / "starts"
        while not path.exists() or len(lines := path.read_text().splitlines()) < count:
            time.sleep(0.02)
        return float(lines[count - 1])

    def _wait_for_queue(self) -> None:
        # A job that still completes would hold the node for which the next measure's job waits.
        while self.slurm.knows_jobs():
            time.sleep(0.1)


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("hosts", "slurm", "work"):
            (folder / part).mkdir()
        hosts = Hosts(folder / "hosts")
        slurm = Slurm(hosts, folder / "slurm", scheduler="backfill")
        try:
            bench = Bench(slurm, folder / "work")
            for mode, title, bound in (
                ("start", "submit until the script's first line", SUBMIT_BOUND),
                ("stop", "end of one job until the first line of the next", NEXT_BOUND),
            ):
                contenders = {OURS: lambda mode=mode: bench.measure(mode, True),
                              "sbatch by hand": lambda mode=mode: bench.measure(mode, False)}  # fmt: skip
                starts = alternate(contenders, args.rounds)
                table = Table(f"{title}, s, medians of {args.rounds}", ["s", "beyond sbatch"])
                by_hand = median(starts["sbatch by hand"], "s")
                for contender, each in starts.items():
                    beyond = median(each, "s") - by_hand
                    if contender == OURS:
                        limit = at_most(beyond, bound)
                    else:
                        limit = None
                    table.row(contender, median(each, "s"), beyond, bound=limit)
                yield table
        finally:
            slurm.close()
            hosts.close()
    table = Table("lines", ["lines"])
    for what, paths, bound in (
        ("det_core/slurm", [ROOT / "det_core" / "slurm"], LINES_BOUND),
        ("its tests", [ROOT / "tests" / "slurm", ROOT / "tests" / "fast" / "slurm"], LINES_OF_TESTS_BOUND),
    ):
        lines = sum(len(file.read_text().splitlines()) for path in paths for file in path.glob("*.py"))
        table.row(what, lines, bound=at_most(lines, bound))
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=5)
