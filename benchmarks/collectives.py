"""``allgather``, ``gather`` and ``broadcast`` between ranks, beside determined's.

Ranks are processes of this machine; each turn starts them anew. Of a small dictionary the time of a call counts, the
best of some rounds, as whatever else runs can only add to it. Of an array of 64 MB it is the time until every rank has
it, and until each has read all of it as well. The last tables are of large jobs, of threads in processes that take each
other for machines, so that most links are TCP, with CURVE, as between machines: 256 ranks, 32 in each of 8 processes;
and 256 and 1,024 ranks, 8 in each of 32 and of 128, which are started together. There the meeting counts from the first
constructor's call to the last one's return on the chief's machine, and the death of a process from its ``kill -9`` to
the last rank's error; with ``--against`` each figure has to be no more than that commit's, times the bound.
"""

import functools
from collections.abc import Sequence

from benchmarks._bench import OURS, PEERS, Args, Table, Tables, at_least, at_most, program, quick
from benchmarks._processes import DETERMINED, TORCH, answer, ours, peers, trees
from benchmarks._turns import Figures, alternate, best, median, ratio

SLOWER = 1.0
FASTER = 2.5
MANY_SLOWER = 1.0
"""Bounds: times determined's time, times its MB/s at the most ranks, times that of the commit of ``--against``."""
LARGE_JOBS = quick({32: (1.0, 1.0, 1.3, 1.0), 128: (1.0, 1.0, 1.2, 1.0)}, {2: (1.0, 1.0, 1.3, 1.0)})
"""By the number of processes, the bounds of the figures of ``NODES``, times those of the commit of ``--against``."""
SIZES, MEGABYTES, PROCESSES, THREADS = quick(((2, 4, 8), 64, 8, 32), ((2,), 1, 2, 2))

PACKAGE = """
import functools, importlib
package, calls = sys.argv[1], int(sys.argv[2])
ranks = context(importlib.import_module(package + ".core"))
allgather, gather, broadcast = ranks.allgather, ranks.gather, ranks.broadcast
def finish(found):
    if RANK == 0:
        answer(found)
    ranks.close()
"""
SMALL = PACKAGE + """
thing = {"loss": 0.5, "rank": RANK, "accuracy": 0.75}
def microseconds(collective):
    for _ in range(10):
        out = collective(thing)
    assert RANK or [each["rank"] for each in out] == list(range(SIZE))
    took = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(calls):
            collective(thing)
        took.append((time.perf_counter() - began) / calls)
    return min(took) * 1e6
finish({"allgather": microseconds(allgather), "gather": microseconds(gather)})
"""  # fmt: skip
LARGE = PACKAGE + f"""
import numpy as np
array = np.random.default_rng(7).integers(0, 1000, {MEGABYTES * 1_000_000 // 8}) if RANK == 0 else None
want = broadcast(None if array is None else int(array.sum()))
found = {{"has it": [], "has read it": []}}
for name, took in found.items():
    for _ in range(calls):
        allgather(0)
        began = time.perf_counter()
        got = broadcast(array)
        right = name == "has it" or int(got.sum()) == want
        assert all(allgather(right))
        took.append(time.perf_counter() - began)
        assert int(got.sum()) == want
finish({{name: min(took) for name, took in found.items()}})
"""  # fmt: skip
MANY = """
from concurrent.futures import ThreadPoolExecutor
from det_core import core
threads, calls, took = *map(int, sys.argv[1:]), []
def rank(number):
    ranks = core.DistributedContext(
        rank=RANK * threads + number, size=SIZE * threads, local_rank=number, local_size=threads, cross_rank=RANK,
        cross_size=SIZE, chief_ip="127.0.0.1", pub_port=PORT,
    )
    for _ in range(calls + 3):
        began = time.perf_counter()
        ranks.allgather({"loss": 0.5, "rank": ranks.rank})
        if ranks.rank == 0:
            took.append(time.perf_counter() - began)
    ranks.allgather(0)  # commits of --against may have no barrier
    ranks.close()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(rank, range(threads)))
if RANK == 0:
    answer({"ms": sorted(took[3:])[calls // 2] * 1e3})
"""
NODES = """
import signal, threading
from pathlib import Path
from det_core import core
from det_core.errors import PeerLost
LOCAL, calls = 8, int(sys.argv[1])
shared = Path(os.environ["BENCH_ANSWER"] + ".shared")
shared.mkdir(exist_ok=True)
begun, best, errors = [], [], []
def rank(number):
    begun.append(time.time())
    ranks = core.DistributedContext(
        rank=RANK * LOCAL + number, size=SIZE * LOCAL, local_rank=number, local_size=LOCAL, cross_rank=RANK,
        cross_size=SIZE, chief_ip="127.0.0.1", pub_port=PORT,
    )
    met = time.time()
    begins = ranks.allgather(begun[0])
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        ranks.allgather({"loss": 0.5, "rank": ranks.rank})
        took.append(time.perf_counter() - began)
    if ranks.rank == 0:
        memory = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
        best.append({"meet s": met - min(begins), "allgather ms": min(took) * 1e3, "chief MiB": memory / 1024})
    ranks.allgather(0)
    if RANK == SIZE - 1:
        if number == 0:
            time.sleep(2)  # until the others wait
            (shared / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    try:
        ranks.allgather(1)
    except PeerLost:
        errors.append(time.time())
threads = [threading.Thread(target=rank, args=(number,)) for number in range(LOCAL)]
if RANK == SIZE - 1 and os.fork():
    os.wait()  # its death is not a failure of the benchmark
    os._exit(0)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(errors) == LOCAL
(shared / f"{RANK}.writing").write_text(str(max(errors)))
(shared / f"{RANK}.writing").rename(shared / str(RANK))
if RANK == 0:
    nodes = [shared / str(node) for node in range(SIZE - 1)]
    while not all(node.exists() for node in nodes):
        time.sleep(0.1)
    last = max(float(node.read_text()) for node in nodes)
    answer(best[0] | {"last error s": last - float((shared / "killed").read_text())})
os._exit(0)
"""


def measure(args: Args) -> Tables:
    columns = [*trees(args.against), *([DETERMINED] if PEERS else []), "of determined"]
    table = Table("collectives of a small object, µs a call, each the best of its turns", columns)
    for size in SIZES:
        found = turns(args, SMALL, size, quick(300, 10))
        for name in ("allgather", "gather"):
            if PEERS:
                times = ratio(found[OURS], found[DETERMINED], name)
            else:
                times = None
            cells = [*(best(each, name) for each in found.values()), times]
            table.row(f"{name}, {size} ranks", *cells, bound=at_most(times, SLOWER))
    yield table
    table = Table(f"broadcast of {MEGABYTES} MB, MB/s, each the best of its turns", columns)
    for size in SIZES:
        found = turns(args, LARGE, size, quick(4, 1))
        for name in ("has it", "has read it"):
            if PEERS:
                times = ratio(found[DETERMINED], found[OURS], name)
            else:
                times = None
            cells = [*(MEGABYTES / best(each, name) for each in found.values()), times]
            if size == SIZES[-1]:
                bound = at_least(times, FASTER)
            else:
                bound = None
            table.row(f"{size} ranks, each {name}", *cells, bound=bound)
    yield table
    columns = [*trees(args.against), "of that"]
    table = Table(f"{PROCESSES * THREADS} ranks over TCP in {PROCESSES} processes, best of {args.rounds} jobs", columns)
    # Without a secret, ranks of several machines do not connect; with one, everything is encrypted.
    secret = {"DET_CORE_SECRET": "of this benchmark alone"}
    found = alternate(ours(args, MANY, THREADS, quick(11, 1), ranks=PROCESSES, env=secret), args.rounds)
    beside(table, "allgather ms", [best(each, "ms") for each in found.values()], MANY_SLOWER)
    yield table
    for processes, limits in LARGE_JOBS.items():
        yield large_job(args, processes, limits, secret)


def large_job(args: Args, processes: int, limits: Sequence[float], secret: dict[str, str]) -> Table:
    """Return the figures of a job of so many processes of 8 ranks, beside those of another commit."""
    columns = [*trees(args.against), "of that"]
    rounds = quick(max(1, args.rounds // 3), 1)
    found = alternate(ours(args, NODES, quick(5, 1), ranks=processes, env=secret), rounds)
    table = Table(f"{processes * 8} ranks over TCP in {processes} processes, median of {rounds} jobs", columns)
    for name, limit in zip(("meet s", "allgather ms", "last error s", "chief MiB"), limits, strict=True):
        beside(table, name, [median(each, name) for each in found.values()], limit)
    return table


def beside(table: Table, name: str, figures: Sequence[float], limit: float) -> None:
    """Add a row with our figure, and beside it that of another commit, where there is one."""
    if len(figures) > 1:
        times = figures[0] / figures[1]
    else:
        times = None
    table.row(name, *figures, times, bound=at_most(times, limit))


def turns(args: Args, code: str, size: int, calls: int) -> dict[str, list[Figures]]:
    """Return the figures of each package."""
    contenders = ours(args, code, "det_core", calls, ranks=size)
    if PEERS:
        python = peers(TORCH, "numpy", DETERMINED)
        contenders[DETERMINED] = functools.partial(answer, code, "determined", calls, ranks=size, python=python)
    return alternate(contenders, args.rounds)


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True)
