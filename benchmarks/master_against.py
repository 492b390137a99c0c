"""This tree's master beside that of another commit (``--against``): reports, decisions, long polls, ``create``.

Reports: ten floats each from 8 writers, until they can be read back, as in ``master_reports``. Decisions: trials of a
random search whose allocations end at once, without processes; each takes a launch, an end and a decision. Long polls:
processor time of the master while trials wait on them, as in ``master_polls``. ``create``: from the command to the
first line of a script, with a master that runs.
"""

import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import master_polls, master_reports
from benchmarks._bench import OURS, Args, Table, Tables, at_least, at_most, program, quick
from benchmarks._master import Master, running, running_at, until
from benchmarks._processes import HANGS, environment, trees
from benchmarks._turns import Figures, alternate, median, ratio

TRIALS = quick(1000, 5)
SLOTS = 16
CREATES = quick(5, 1)
SLOWER_MS = 60.0
"""Bound of ``create``, beyond the other commit's."""
SEARCH = {
    "name": "decisions",
    "entrypoint": "true",
    "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
    "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": TRIALS},
}
INSTANT = """
import sys
from pathlib import Path
from benchmarks import _master
from det_core.master import engines

class Instant(_master.ScriptedEngine):
    async def launch(self, ticket):
        await super().launch(ticket)
        self.end(ticket.allocation_id)
        self.launched.clear()

slots = int(sys.argv[2])
pool = engines.Pool(slots) if hasattr(engines, "Pool") else list(range(slots))  # earlier commits count slots by a list
_master.run(_master.Options(Path(sys.argv[1])), Instant(pool))
"""
LINE = "import time; open({!r}, 'w').write(repr(time.time()))\n"
CONFIG = """\
name: first-line
entrypoint: python script.py
searcher: {name: single, metric: loss, max_length: 1}
max_restarts: 0
"""


def measure(args: Args) -> Tables:
    contenders = {name: functools.partial(figures, tree) for name, tree in trees(args.against).items()}
    found = alternate(contenders, args.rounds)
    table = Table(f"a master beside another commit's, medians of {args.rounds}", ["found", "ours is times"])
    for name, better in (("reports/s", True), ("decisions/s", True), ("processor of the polls", False)):
        for who, rounds in found.items():
            times = ratio(found[OURS], rounds, name)
            bound = None
            if who != OURS:
                bound = at_least(times, 1.0) if better else at_most(times, 1.0)
            table.row(f"{name}, {who}", median(rounds, name), times, bound=bound)
    yield table
    table = Table("experiment create to the first line, a master runs", ["ms", "ours beyond it"])
    ours = median(found[OURS], "create")
    for who, rounds in found.items():
        took = median(rounds, "create")
        table.row(who, took, ours - took, bound=None if who == OURS else at_most(ours - took, SLOWER_MS))
    yield table


def figures(tree: Path) -> Figures:
    """Return all figures of a tree's master."""
    with running(0, tree=tree) as master:
        reports = master_reports.ours(master)
    return {
        "reports/s": reports,
        "decisions/s": decisions(tree),
        "processor of the polls": polls(tree),
        "create": 1e3 * create(tree),
    }


def decisions(tree: Path) -> float:
    """Return the trials a second of a search whose trials end at once."""
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as name:
        home = Path(name)
        command = [sys.executable, "-c", INSTANT, str(home), str(SLOTS)]
        process = subprocess.Popen(command, env=environment(home, tree), cwd=home)
        try:
            api = Master(home, process).api()
            began = time.perf_counter()
            number = api.create(SEARCH)
            while "endTime" not in api.ask("GET", f"experiments/{number}/wait?timeout_seconds=60")["experiment"]:
                pass
            return TRIALS / (time.perf_counter() - began)
        finally:
            process.terminate()
            process.wait(HANGS)


def polls(tree: Path) -> float:
    """Return the processor time a second of a master whose trials wait on the long poll."""
    with running(master_polls.TRIALS, "benchmarks._master", tree=tree) as master:
        file = master.home / "launched.jsonl"
        number = master.api().create(master_polls.CONFIG)
        until(lambda: file.exists() and file.read_text().count("\n") >= master_polls.TRIALS)
        tokens = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
        core = asyncio.run(master_polls.poll(master, number, tokens))[0]
    return max(core, 1e-4)  # the kernel counts in steps of 10 ms, and a few polls take less


def create(tree: Path) -> float:
    """Return the seconds from ``experiment create`` to the first line of its script, the least of some."""
    with tempfile.TemporaryDirectory(prefix="det-core-bench-") as name:
        folder = Path(name)
        home = folder / "home"
        context = folder / "context"
        note = folder / "note"
        context.mkdir()
        home.mkdir()
        (context / "script.py").write_text(LINE.format(str(note)))
        (folder / "config.yaml").write_text(CONFIG)
        cli = [sys.executable, "-m", "det_core.cli", "experiment"]
        run: Callable[..., object] = functools.partial(
            subprocess.run, cwd=folder, env=environment(home, tree), check=True, capture_output=True, timeout=HANGS
        )
        took = []
        with running_at(home, SLOTS, "det_core.master", tree=tree):
            for _ in range(CREATES):
                note.unlink(missing_ok=True)
                began = time.time()  # the wall clock, as the script reads it in another process
                run([*cli, "create", "config.yaml", "context"])
                took.append(float(until(lambda: note.exists() and note.read_text())) - began)
                run([*cli, "wait", "latest"])
        return min(took)


if __name__ == "__main__":
    program(measure, __doc__, rounds=3, against=True)
