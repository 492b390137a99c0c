"""Cost of a master while 1,000 trials wait on the preemption long poll, and the time to wake all of them.

The trials are connections that poll as the Core API's clients do, for 60 s at a time with the token of their
allocation; the engine runs no processes. The master is watched for so long that each poll ends once, and is made again.
"""

import asyncio
import json
import time

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import Master, running, until

TRIALS, SECONDS = quick((1000, 75.0), (10, 1.0))
CORE = 0.20
MEMORY_MB = 300
"""Bounds: of one core, and at most at a time."""
CONFIG = {
    "name": "polls",
    "entrypoint": "true",
    "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
    "searcher": {"name": "random", "metric": "loss", "max_length": 1, "max_trials": TRIALS,
                 "max_concurrent_trials": TRIALS},
}  # fmt: skip


def measure(args: Args) -> Tables:
    with running(TRIALS, "benchmarks._master") as master:
        # First, as the kernel's mark of the largest size never falls.
        idle = master.peak()
        file = master.home / "launched.jsonl"
        experiment = master.api().create(CONFIG)
        until(lambda: file.exists() and file.read_text().count("\n") >= TRIALS)
        tokens = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
        core, delays = asyncio.run(poll(master, experiment, tokens))
        memory = master.peak() / 1e6
    title = f"a master with {TRIALS:,} trials that wait on the long poll, for {SECONDS:g} s"
    table = Table(title, ["found"])
    table.row("processor, of one core", core, bound=at_most(core, CORE))
    table.row("memory at most, in MB", memory, bound=at_most(memory, MEMORY_MB))
    table.row("memory before the trials, in MB", idle / 1e6)
    table.row("from the pause request to the first poll's answer, in ms", delays[0] * 1e3)
    table.row("... to the last poll's answer, in ms", delays[-1] * 1e3)
    yield table


async def poll(master: Master, experiment: int, tokens: list[tuple[str, str]]) -> tuple[float, list[float]]:
    """Processor time a second of waiting, and the delays of the answers to a pause."""
    waiting = 0
    woken = []

    async def trial(allocation: str, token: str) -> None:
        nonlocal waiting
        reader, writer = await asyncio.open_connection(*master.url.removeprefix("http://").split(":"))
        path = f"/api/v1/allocations/{allocation}/signals/preemption?timeout_seconds=60"
        # By hand: the trials run on the same processors as the master, and a client library would take more of them.
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
    # What the start of the trials has left to do is not the cost of their waiting.
    await asyncio.sleep(quick(5, 0.1))
    began = time.monotonic()
    used = master.cpu()
    await asyncio.sleep(SECONDS)
    core = (master.cpu() - used) / (time.monotonic() - began)
    sent = time.perf_counter()
    # In a thread, as the loop has to see the polls answered while this request is on its way.
    await asyncio.to_thread(master.api().ask, "POST", f"experiments/{experiment}/pause")
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return core, [moment - sent for moment in sorted(woken)]


if __name__ == "__main__":
    program(measure, __doc__)
