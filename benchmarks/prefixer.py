"""Lines a second through the launcher's prefixes, four ranks: ours, ``torchrun --tee 3``, determined's ``wrap_rank``.

Each rank writes the same lines, in three ways:

buffered    in writes of 125 lines (8 KB, as Python does unless it writes to a terminal), as fast as they are taken
unbuffered  in a write for each line, as a script does under ``python -u``, as fast as they are taken
paced       as buffered, but 110,000 lines a second and rank

The time runs from the moment at which all ranks are told to go, to the arrival of the last line at whoever reads the
launcher's stdout. The processor time is that of all but the scripts: launcher, supervisor, wrappers. Where the lines
come as fast as they are taken, more of them take more of it, so the bound is on what 400,000 lines a second would take;
where they are paced it is on what was taken.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

BOUND_LINES = 400_000.0
BOUND_CORES = 1.0
RANKS = 4
PIECE = 125
PACE = 110_000
PATIENCE = 600.0
"""Seconds for one launcher to start, or to carry its lines."""
SETTLED = 2.0
"""Seconds without a byte after which what has not come waits for the script's end, in somebody's buffer."""
HOWS = ("buffered", "unbuffered", "paced")
SCRIPT = """
import os, sys, time
folder, count, lines, pace = sys.argv[1], *map(int, sys.argv[2:])
piece = b"epoch 3/90: step 12345, loss 0.1234, lr 0.0010, 3210 images/s\\n" * lines
open(f"{folder}/ready-{os.getpid()}", "w").close()
def wait_for(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.01)
wait_for("go")
begin = time.monotonic()
for number in range(count // lines):
    if pace:
        time.sleep(max(0.0, begin + number * lines / pace - time.monotonic()))
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(1, rest):]
wait_for("end")
"""


@dataclass(frozen=True)
class Carried:
    """What one launcher did with its ranks' lines."""

    lines: int
    """How many came, those after the script's end included."""
    late: int
    """How many of them came only when the scripts had ended."""
    rate: float
    """Lines a second."""
    cores: float
    """Processor seconds a second of all but the scripts."""


def ours() -> list[str]:
    """Our launcher."""
    return [sys.executable, "-m", "det_core.launch.torch_distributed", "--nproc-per-node", str(RANKS)]


def torchrun() -> list[str]:
    """torchrun with prefixes on its own terminal."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--tee", "3"]


def wrap_rank() -> list[str]:
    """torchrun as determined's launcher runs it: around ``wrap_rank``."""
    python = str(peers_python("torch==2.13.0", "numpy", "determined==0.38.1"))
    agent = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--no-python"]
    return [*agent, python, "-m", "determined.launch.wrap_rank", "RANK", "--", python, "-u"]


CARRIERS: dict[str, Callable[[], list[str]]] = {"det_core": ours, "torchrun --tee 3": torchrun}
if not QUICK:
    CARRIERS["determined's wrap_rank"] = wrap_rank


def carried(launcher: list[str], lines: int, how: str) -> Carried:
    """Have ``RANKS`` scripts write so many lines each through a launcher, in one of the ways of ``HOWS``.

    Raises:
        RuntimeError: the launcher failed, or lines are missing.
    """
    job = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name, open(Path(name, "errors"), "w+b") as errors:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        piece, pace = 1 if how == "unbuffered" else PIECE, PACE if how == "paced" else 0
        command = [*launcher, str(folder / "script.py"), name, str(lines), str(piece), str(pace)]
        environment = {**os.environ, "BENCH_JOB": job, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        try:
            found = _watched(process, folder, job, lines * RANKS)
            status = process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        if status or found.lines != lines * RANKS:
            errors.seek(0)
            said = errors.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"{found.lines} of {lines * RANKS} lines came, status {status}: {command}\n{said}")
        return found


def _watched(process: subprocess.Popen[bytes], folder: Path, job: str, total: int) -> Carried:
    """Let the scripts go once all are there, read their lines, and let them end."""
    deadline = time.monotonic() + PATIENCE
    while len(scripts := [int(path.name[6:]) for path in folder.glob("ready-*")]) < RANKS:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the scripts do not run: {process.args!r}\n{(folder / 'errors').read_text()[-2000:]}")
        time.sleep(0.01)
    assert process.stdout is not None
    carriers = _processes(job) - set(scripts)
    spent, began = _processor_seconds(carriers), time.monotonic()
    (folder / "go").touch()
    lines, last = _read(process.stdout.fileno(), total)
    spent = _processor_seconds(carriers) - spent
    (folder / "end").touch()
    late, _ = _read(process.stdout.fileno(), total, to_the_end=True)
    return Carried(lines + late, late, lines / (last - began), spent / (last - began))


def _read(fd: int, total: int, *, to_the_end: bool = False) -> tuple[int, float]:
    """How many lines can be read before no more come, and when the last of them did."""
    lines, last = 0, time.monotonic()
    while to_the_end or lines < total:
        if not select.select([fd], [], [], PATIENCE if to_the_end or not lines else SETTLED)[0]:
            break
        data = os.read(fd, 1024 * 1024)
        if not data:
            break
        lines, last = lines + data.count(b"\n"), time.monotonic()
    return lines, last


def _processes(job: str) -> set[int]:
    """Every process of a job."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"BENCH_JOB={job}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def _processor_seconds(pids: set[int]) -> float:
    """What processes that live have spent so far, all their threads together."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Print the table; 1 if ours does not meet the bounds."""
    parser = options(__doc__)
    parser.add_argument("--lines", type=int, default=quick(500_000, 1000), help="of each rank (default: 500000)")
    parser.add_argument("--rounds", type=int, default=quick(3, 1), help="of which the medians count (default: 3)")
    parser.add_argument("--only", choices=list(CARRIERS), help="leave the others out")
    args = parser.parse_args()
    lines = max(1, args.lines // PIECE) * PIECE
    commands = {name: command() for name, command in CARRIERS.items() if args.only in (None, name)}
    rows = [row for how in HOWS for row in measured(commands, lines, how, args.rounds)]
    print_table(
        f"{RANKS} ranks, {lines:,} lines each, medians of {args.rounds}",
        ("", "lines/s", "at least", "cores", "for 400,000/s", "at most", "came late", "met"),
        rows,
    )
    return int(any(row[-1] is False for row in rows))


def measured(commands: dict[str, list[str]], lines: int, how: str, rounds: int) -> list[tuple[object, ...]]:
    """The rows of one way to write lines."""
    found: dict[str, list[Carried]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in sorted(commands, reverse=number % 2 == 1):
            found[name].append(carried(commands[name], lines, how))
    rows: list[tuple[object, ...]] = []
    for name, each in found.items():
        rate, cores = (statistics.median(getattr(one, what) for one in each) for what in ("rate", "cores"))
        needed = cores * BOUND_LINES / rate
        late = max(one.late for one in each)
        if name == "det_core":
            met = rate >= BOUND_LINES and (cores if how == "paced" else needed) <= BOUND_CORES
            rows.append((f"{how}: {name}", rate, BOUND_LINES, cores, needed, BOUND_CORES, late, met))
        else:
            rows.append((f"{how}: {name}", rate, None, cores, needed, None, late, None))
    return rows


if __name__ == "__main__":
    raise SystemExit(status(main()))
