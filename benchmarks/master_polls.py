"""What a master needs while 1,000 trials wait on the preemption long poll, and how fast all of them are woken.

Run it with ``python -m benchmarks.master_polls``. The trials are connections that poll as the Core API's clients do,
for 60 s at a time with the token of their allocation; the engine runs no processes.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from benchmarks._master import Master, running
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

TRIALS = quick(1000, 10)
SECONDS = quick(75.0, 1.0)
"""How long the master is watched: each poll ends once meanwhile, and is made again."""
CORE_BOUND = 0.20
MEMORY_BOUND = 300e6
CONFIG = f"""
name: polls
entrypoint: "true"
hyperparameters: {{x: {{type: double, minval: 0, maxval: 1}}}}
searcher: {{name: random, metric: loss, max_length: 1, max_trials: {TRIALS}, max_concurrent_trials: {TRIALS}}}
"""


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    with running("--slots", str(TRIALS), module="benchmarks._master") as master:
        idle = master.peak()
        experiment = master.api().ask("POST", "experiments", {"config": CONFIG})["experiment"]["id"]
        tokens = _launched(master.home / "launched.jsonl")
        core, delays = asyncio.run(_poll(master, experiment, tokens))
        memory = master.peak()
    rows = [
        ("processor, of one core", core, CORE_BOUND, core <= CORE_BOUND),
        ("memory at most, in MB", memory / 1e6, MEMORY_BOUND / 1e6, memory <= MEMORY_BOUND),
        ("memory before the trials, in MB", idle / 1e6, None, None),
        ("from the pause request to the first poll's answer, in ms", delays[0] * 1e3, None, None),
        ("... to the last poll's answer, in ms", delays[-1] * 1e3, None, None),
    ]
    print_table(
        f"a master with {TRIALS:,} trials that wait on the long poll, for {SECONDS:g} s",
        ("", "found", "bound", "met"),
        rows,
    )
    return int(core > CORE_BOUND) + int(memory > MEMORY_BOUND)


def _launched(file: Path) -> list[tuple[str, str]]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if file.exists() and len(lines := file.read_text().splitlines()) >= TRIALS:
            return [tuple(json.loads(line)) for line in lines]
        time.sleep(0.1)
    raise RuntimeError(f"not all of {TRIALS} trials were started within 120 s")


async def _poll(master: Master, experiment: int, tokens: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Processor time a second of waiting, and the delays of the answers to a pause."""
    waiting, woken = 0, []

    async def trial(allocation: str, token: str) -> None:
        nonlocal waiting
        host, port = master.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = f"/api/v1/allocations/{allocation}/signals/preemption?timeout_seconds=60"
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nGrpc-Metadata-x-allocation-token: Bearer {token}\r\n\r\n".encode()
        preempt = False
        while not preempt:
            writer.write(head)
            waiting += 1
            answer = await reader.readuntil(b"}")
            preempt = b'"preempt":true' in answer
            assert b" 200 " in answer, answer
        woken.append(time.perf_counter())
        writer.close()

    tasks = [asyncio.ensure_future(trial(*each)) for each in tokens]
    while waiting < TRIALS:
        await asyncio.sleep(0.1)
    await asyncio.sleep(quick(5, 0.1))
    began, used = time.monotonic(), master.cpu()
    await asyncio.sleep(SECONDS)
    core = (master.cpu() - used) / (time.monotonic() - began)
    sent = time.perf_counter()
    await asyncio.to_thread(master.api().ask, "POST", f"experiments/{experiment}/pause")
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return core, [moment - sent for moment in sorted(woken)]


if __name__ == "__main__":
    raise SystemExit(status(main()))
