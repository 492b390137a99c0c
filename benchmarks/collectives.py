"""``allgather``, ``gather`` and ``broadcast`` between ranks, beside determined's.

Ranks are processes of this machine; each turn starts them anew. Of a small dictionary the time of a call counts, the
best of some rounds, as whatever else runs can only add to it. Of an array of 64 MB it is the time until every rank has
it, and until each has read all of it as well. The last table is of a large job: 256 ranks, 32 threads in each of 8
processes that take each other for machines, so that most links are TCP, with CURVE, as between machines.
"""

import functools

from benchmarks._bench import OURS, PEERS, Args, Table, Tables, at_least, at_most, program, quick
from benchmarks._processes import DETERMINED, TORCH, answer, ours, peers, trees
from benchmarks._turns import Figures, alternate, best, ratio

SLOWER, FASTER, MANY_MS = 1.0, 2.5, 69.0
"""Bounds: times determined's time, times its MB/s at the most ranks, milliseconds of 256 ranks."""
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
    ranks.barrier()
    ranks.close()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(rank, range(threads)))
if RANK == 0:
    answer({"ms": sorted(took[3:])[calls // 2] * 1e3})
"""


def measure(args: Args) -> Tables:
    columns = [*trees(args.against), *([DETERMINED] if PEERS else []), "of determined"]
    table = Table("collectives of a small object, µs a call, each the best of its turns", columns)
    for size in SIZES:
        found = turns(args, SMALL, size, quick(300, 10))
        for name in ("allgather", "gather"):
            times = ratio(found[OURS], found[DETERMINED], name) if PEERS else None
            cells = [*(best(each, name) for each in found.values()), times]
            table.row(f"{name}, {size} ranks", *cells, bound=at_most(times, SLOWER))
    yield table
    table = Table(f"broadcast of {MEGABYTES} MB, MB/s, each the best of its turns", columns)
    for size in SIZES:
        found = turns(args, LARGE, size, quick(4, 1))
        for name in ("has it", "has read it"):
            times = ratio(found[DETERMINED], found[OURS], name) if PEERS else None
            cells = [*(MEGABYTES / best(each, name) for each in found.values()), times]
            bound = at_least(times, FASTER) if size == SIZES[-1] else None
            table.row(f"{size} ranks, each {name}", *cells, bound=bound)
    yield table
    table = Table(f"allgather of {PROCESSES * THREADS} ranks over TCP, best of {args.rounds} jobs", ["ms"])
    secret = {"DET_CORE_SECRET": "of this benchmark alone"}
    found = alternate(ours(args, MANY, THREADS, quick(11, 1), ranks=PROCESSES, env=secret), args.rounds)
    table.fill(found, lambda ms: at_most(ms, MANY_MS), pick=best)
    yield table


def turns(args: Args, code: str, size: int, calls: int) -> dict[str, list[Figures]]:
    """What each package found."""
    contenders = ours(args, code, "det_core", calls, ranks=size)
    if PEERS:
        python = peers(TORCH, "numpy", DETERMINED)
        contenders[DETERMINED] = functools.partial(answer, code, "determined", calls, ranks=size, python=python)
    return alternate(contenders, args.rounds)


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True)
