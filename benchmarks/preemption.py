"""Cost of ``should_preempt()`` at 1 to 8 ranks, beside determined's.

The bound is for a rank that has a core, so ranks ask one after the other; all at once they share the machine's.
"""

import functools
import os

from benchmarks._bench import PEERS, Args, Table, Tables, at_most, program, quick
from benchmarks._processes import DETERMINED, answer, ours, peers
from benchmarks._turns import alternate, best

BOUND_US = 0.2
SIZES = quick((1, 2, 4, 8), (1, 2))

CALL = """
import importlib
package, calls = sys.argv[1], int(sys.argv[2])
core = importlib.import_module(package + ".core")
distributed = context(core)
with core.init(distributed=distributed) as ctx:
    should_preempt = ctx.preempt.should_preempt
    should_preempt()
    def once():
        start = time.perf_counter()
        for _ in range(calls):
            should_preempt()
        return (time.perf_counter() - start) / calls * 1e6
    together, alone = [], []
    for _ in range(5):
        distributed.allgather(None)
        together.append(once())
    for turn in range(5 * SIZE if package == "det_core" else 0):  # determined's workers ask the chief: none is alone
        distributed.allgather(None)
        if turn % SIZE == RANK:
            alone.append(once())
    worst = distributed.gather((min(together), *map(min, [alone] if alone else [])))
    if RANK == 0:
        answer(dict(zip(("all at once", "rank by rank"), map(max, zip(*worst)))))
"""


def measure(args: Args) -> Tables:
    cores = len(os.sched_getaffinity(0))
    title = f"should_preempt(), the slowest rank, µs, best of {args.rounds} jobs, {cores} cores"
    table = Table(title, ["rank by rank", "all at once"])
    for size in SIZES:
        contenders = ours(args, CALL, "det_core", quick(200_000, 1000), ranks=size)
        if PEERS:
            # Fewer calls, as each of a worker of determined's is a question to the chief and its answer.
            theirs = functools.partial(answer, CALL, "determined", 300, ranks=size)
            contenders[DETERMINED] = functools.partial(theirs, python=peers(DETERMINED))
        found = alternate(contenders, args.rounds)
        table.fill(found, lambda alone, _: at_most(alone, BOUND_US), f"{size} ranks: ", best)
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True)
