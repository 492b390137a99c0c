"""What one ``should_preempt()`` call costs at 1, 2, 4 and 8 ranks: ours, and determined's.

Run it with ``python -m benchmarks.should_preempt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick
from benchmarks._table import print_table

SIZES = quick((1, 2, 4, 8), (1, 2))
BOUND_US = 0.2
CALLS = {"ours": quick(200_000, 1000), "determined": 300}

OURS = """
import json, sys, time
from det_core import core

rank, size, port, calls = map(int, sys.argv[1:])
distributed = core.DistributedContext(
    rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, pub_port=port
)
with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    should_preempt = ctx.preempt.should_preempt
    should_preempt()

    def once():
        start = time.perf_counter()
        for _ in range(calls):
            should_preempt()
        return (time.perf_counter() - start) / calls

    together, alone = [], []
    for _ in range(5):
        distributed.allgather(None)
        together.append(once())
    for _ in range(5):
        for turn in range(size):
            distributed.allgather(None)
            if turn == rank:
                alone.append(once())
    worst = distributed.gather((min(alone), min(together)))
    if rank == 0:
        print(json.dumps([max(w[0] for w in worst), max(w[1] for w in worst)]))
"""

DETERMINED = """
import json, sys, time
import determined as det

rank, size, port, calls = map(int, sys.argv[1:])
distributed = det.core.DistributedContext(
    rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1,
    pub_port=port, pull_port=port + 1, chief_ip="127.0.0.1",
)
with det.core.init(distributed=distributed) as ctx:
    should_preempt = ctx.preempt.should_preempt
    should_preempt()
    took = []
    for _ in range(5):
        distributed.allgather(None)
        start = time.perf_counter()
        for _ in range(calls):
            should_preempt()
        took.append((time.perf_counter() - start) / calls)
    worst = distributed.gather(min(took))
    if rank == 0:
        print(json.dumps([max(worst)]))
"""


def measure(python: Path, code: str, size: int, calls: int, port: int) -> list[float]:
    """Microseconds a call on the slowest rank, the best of five batches; the figures that ``code`` prints."""
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "DET_CORE_HOME": home}
        ranks = [
            subprocess.Popen(
                [python, "-c", code, str(rank), str(size), str(port), str(calls)],
                env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{size} ranks of {python} ended with {[rank.returncode for rank in ranks]}")
    return [seconds * 1e6 for seconds in json.loads(outputs[0].splitlines()[-1])]


def main() -> None:
    """Print the table."""
    options(__doc__).parse_args()
    peer = None if QUICK else peers_python("determined==0.38.1")
    rows = []
    for i, size in enumerate(SIZES):
        alone, together = measure(Path(sys.executable), OURS, size, CALLS["ours"], 21360 + 4 * i)
        (theirs,) = measure(peer, DETERMINED, size, CALLS["determined"], 22360 + 4 * i) if peer else (None,)
        rows.append([size, alone, together, theirs, f"<= {BOUND_US}", alone <= BOUND_US])
    cores = len(os.sched_getaffinity(0))
    columns = ["ranks", "ours, rank by rank", "ours, all at once", "determined, all at once", "bound", "met"]
    print_table(f"should_preempt(), microseconds a call, {cores} cores", columns, rows)
    print(f"  The bound is for a rank that has a core; all at once, the ranks share {cores}.")


if __name__ == "__main__":
    main()
