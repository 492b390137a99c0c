"""Start the ranks of one measurement and collect what rank 0 found, for det_core and for its peers in turn."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import quick

PEERS: dict[str, str] = quick({"determined": "determined 0.38.1", "gloo": "torch gloo objects"}, {})
"""Packages, as ``_rank.py`` and the tables call them."""
OURS = "det_core"
TIMEOUT = 600.0
REPEATS = {"gloo": 1}
"""How often each package is measured; 5 times where it is close. What else the machine does comes and goes."""
_RANK = Path(__file__).parent / "_rank.py"


def measure(size: int, what: str, calls: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """What each package needs with ``size`` ranks: by package and measure, the best of a few repeats in turn.

    Args:
        what: ``small`` or ``large``, a measurement of ``_rank.py``.
        calls: by package, how many calls are timed together.
    """
    python = peers_python("torch==2.13.0", "numpy", "determined==0.38.1") if PEERS else None
    best: dict[str, dict[str, float]] = {}
    for turn in range(quick(5, 1)):
        for package in (p for p in (OURS, *PEERS) if turn < REPEATS.get(p, 5)):
            found = _job(sys.executable if package == OURS else str(python), package, size, what, calls[package])
            known = best.setdefault(package, found)
            best[package] = {name: min(value, known[name]) for name, value in found.items()}
    return best


def _job(python: str, package: str, size: int, what: str, calls: int) -> dict[str, float]:
    environ = {**os.environ, "WORLD_SIZE": str(size), "PORT": str(_two_free_ports()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [python, str(_RANK), package, what, str(calls)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=TIMEOUT)
        statuses = [rank.wait(TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(statuses):
        raise RuntimeError(f"{package} with {size} ranks: exit statuses {statuses}")
    return {name: float(value) for name, value in json.loads(out.splitlines()[-1]).items()}


def _two_free_ports() -> int:
    """A free port of 127.0.0.1 whose successor is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
