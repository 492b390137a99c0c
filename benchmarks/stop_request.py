"""How long a stop that one rank asks for takes to reach all: from ``request()`` until every rank has returned True.

Eight ranks call ``should_preempt()`` every millisecond; a random one of them asks, again and again. The clock is the
machine's monotonic one, which all processes of a machine share. Run it with ``python -m benchmarks.stop_request``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks._program import options, quick, status
from benchmarks._table import print_table

RANKS = quick(8, 2)
ROUNDS = quick(200, 3)
EVERY_MS = 1.0
BOUND_MS = 20.0

CODE = """
import json, random, sys, time
from det_core import core

rank, size, port, rounds, every = *map(int, sys.argv[1:5]), float(sys.argv[5])
distributed = core.DistributedContext(
    rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, pub_port=port
)
rng = random.Random(7)
with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    preempt, took = ctx.preempt, []
    preempt.should_preempt()
    for _ in range(rounds):
        asker, pause = rng.randrange(size), rng.random() * 0.01
        distributed.barrier()
        asks_at, asked = time.monotonic() + pause, None
        while True:
            if rank == asker and asked is None and time.monotonic() >= asks_at:
                asked = time.monotonic()
                preempt.request()
            if preempt.should_preempt():
                break
            time.sleep(every / 1e3)
        stopped = time.monotonic()
        told = distributed.gather((asked, stopped, preempt._side.calls))
        if rank == 0:
            assert len({calls for *_, calls in told}) == 1
            took.append(max(s for _, s, _ in told) - next(a for a, *_ in told if a is not None))
        preempt.should_preempt()
    if rank == 0:
        print(json.dumps(took))
"""


def measure(port: int) -> list[float]:
    """Milliseconds from a request until all ranks have returned True, for each round."""
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "DET_CORE_HOME": home}
        command = [sys.executable, "-c", CODE]
        numbers = [str(RANKS), str(port), str(ROUNDS), str(EVERY_MS)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *numbers], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            for rank in range(RANKS)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    return [seconds * 1e3 for seconds in json.loads(outputs[0].splitlines()[-1])]


def main() -> int:
    """Print the table; the number of bounds that are not met."""
    options(__doc__).parse_args()
    took = sorted(measure(23460))
    median, p90 = statistics.median(took), took[len(took) * 9 // 10]
    met = median <= BOUND_MS
    print_table(
        f"request() until all {RANKS} ranks have returned True, each calling every {EVERY_MS:g} ms, in milliseconds, "
        f"{ROUNDS} rounds, {len(os.sched_getaffinity(0))} cores",
        ["", "median", "90 %", "largest", "bound of the median", "met"],
        [["request()", median, p90, took[-1], f"<= {BOUND_MS:g}", met]],
    )
    return int(not met)


if __name__ == "__main__":
    raise SystemExit(status(main()))
