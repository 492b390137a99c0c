"""One rank of a benchmark of collectives, for whichever package its interpreter has: ``_rank.py PACKAGE WHAT CALLS``.

Run as a script by det_core's interpreter and by the peers'. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SMALL = {"loss": 0.5, "rank": RANK, "accuracy": 0.75}
ROUNDS = {"gloo": 4}
"""How many rounds are timed, the best of which counts; 20 where a call takes no milliseconds."""


class DetCore:
    """det_core, and determined, whose API it takes over."""

    def __init__(self, core: Any) -> None:
        numbers = {"rank": RANK, "size": SIZE, "local_rank": RANK, "local_size": SIZE, "cross_rank": 0, "cross_size": 1}
        ports = {"pub_port": int(os.environ["PORT"]), "pull_port": int(os.environ["PORT"]) + 1}
        self.context = core.DistributedContext(**numbers, **ports)
        self.allgather: Callable[[Any], Any] = self.context.allgather
        self.gather: Callable[[Any], Any] = self.context.gather
        self.broadcast: Callable[[Any], Any] = self.context.broadcast
        self.close: Callable[[], Any] = self.context.close


class Gloo:
    """torch.distributed's object collectives over gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=RANK, world_size=SIZE)

    def allgather(self, stuff: Any) -> Any:
        """Every rank's object, everywhere."""
        out = [None] * SIZE
        self.dist.all_gather_object(out, stuff)
        return out

    def gather(self, stuff: Any) -> Any:
        """Every rank's object, on rank 0."""
        out = [None] * SIZE if RANK == 0 else None
        self.dist.gather_object(stuff, out)
        return out

    def broadcast(self, stuff: Any) -> Any:
        """Rank 0's object, everywhere."""
        out = [stuff]
        self.dist.broadcast_object_list(out, 0)
        return out[0]

    def close(self) -> None:
        """End the process group."""
        self.dist.destroy_process_group()


def package(name: str) -> Any:
    """The collectives of ``det_core``, ``determined`` or ``gloo``."""
    if name == "gloo":
        return Gloo()
    if name == "det_core":
        sys.path.insert(0, str(Path(__file__).parent.parent))
    return DetCore(importlib.import_module(f"{name}.core"))


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call, over ``calls`` calls: the best of several rounds, because other processes disturb some."""
    best = float("inf")
    for _ in range(ROUNDS.get(sys.argv[1], 20)):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def small_objects(ranks: Any, calls: int) -> dict[str, float]:
    """Seconds per allgather and per gather of a small dictionary."""
    found = {}
    for name, collective in (("allgather", ranks.allgather), ("gather", ranks.gather)):
        for _ in range(10):
            out = collective(SMALL)
        assert RANK or [o["rank"] for o in out] == list(range(SIZE))
        found[name] = seconds(functools.partial(collective, SMALL), calls)
    return found


def large_array(ranks: Any, calls: int) -> dict[str, float]:
    """Seconds until every rank has an array of 64 MB; and until each has also read all of it."""
    import numpy as np

    array = np.random.default_rng(7).random(64_000_000 // 8) if RANK == 0 else None
    want = ranks.broadcast(None if array is None else float(array.sum()))
    found = {}
    for name, read in (("has it", False), ("has read it", True)):
        best = float("inf")
        for _ in range(calls):
            ranks.allgather(0)
            began = time.perf_counter()
            got = ranks.broadcast(array)
            right = not read or float(got.sum()) == want
            assert all(ranks.allgather(right))
            best = min(best, time.perf_counter() - began)
            assert float(got.sum()) == want
        found[name] = best
    return found


def main(name: str, what: str, calls: int) -> None:
    """Measure and, on rank 0, print."""
    ranks = package(name)
    found = (small_objects if what == "small" else large_array)(ranks, calls)
    if RANK == 0:
        print(json.dumps(found), flush=True)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
