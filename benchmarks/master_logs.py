"""Logs of trials: one that floods its own beside a trial that runs and ends, and one of 200,000 lines that is read.

The flood is ``yes``, whose lines the supervisor writes as fast as the disk takes them. It is killed after a while: the
delay is that until the master says so, and its slot is free. The other trial is created before, alone, and then beside
it.
"""

import time

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._master import Api, running, until

FLOOD_SECONDS, LINES = quick((10.0, 200_000), (0.5, 1000))
KILL_SECONDS = 3.0
BESIDE = 2.0
DISK_MIB = 1.1 * 1024
CPU_SECONDS = 0.5
TAIL_MS = 5.0
"""Bounds; BESIDE: times as long as alone."""
MANY = f"seq -f 'line %g of a log, with about as much text as is usual' {LINES}"


def create(api: Api, script: str) -> int:
    """Create an experiment of one trial that runs a shell script."""
    return api.create({
        "name": "logs",
        "entrypoint": script,
        "searcher": {"name": "single", "metric": "loss", "max_length": 1},
        "max_restarts": 0,
    })  # fmt: skip


def ended(api: Api, experiment: int) -> float:
    """Wait for the end of an experiment; return the seconds that took."""
    began = time.monotonic()
    until(lambda: "endTime" in api.ask("GET", f"experiments/{experiment}")["experiment"])
    return time.monotonic() - began


def measure(args: Args) -> Tables:
    with running(2) as master:
        api = master.api()
        alone = min(ended(api, create(api, "true")) for _ in range(args.rounds))
        flood = create(api, "yes")
        time.sleep(FLOOD_SECONDS)
        beside = min(ended(api, create(api, "true")) for _ in range(args.rounds))
        api.ask("POST", f"experiments/{flood}/kill")
        killed = ended(api, flood)
        files = (master.home / "master" / "allocations").glob("*/log/*")
        disk = sum(path.stat().st_size for path in files) / (1 << 20)
        table = Table(f"a trial that runs `yes` for {FLOOD_SECONDS:g} s", ["figure"])
        table.row("kill to end of the trial, s", killed, bound=at_most(killed, KILL_SECONDS))
        table.row("another trial beside it, times alone", beside / alone, bound=at_most(beside / alone, BESIDE))
        table.row("disk, MiB", disk, bound=at_most(disk, DISK_MIB))
        yield table

        before = master.cpu()
        experiment = create(api, MANY)
        ended(api, experiment)
        cpu = master.cpu() - before
        trial = api.ask("GET", f"experiments/{experiment}/trials")["trials"][0]["id"]
        delays = []
        for _ in range(args.rounds):
            began = time.perf_counter()
            assert len(api.ask("GET", f"trials/{trial}/logs?tail=100")) == 100
            delays.append((time.perf_counter() - began) * 1e3)
        table = Table(f"a trial of {LINES} log lines", ["figure"])
        table.row("CPU of the master, s", cpu, bound=at_most(cpu, CPU_SECONDS))
        table.row("last 100 lines by HTTP, ms", min(delays), bound=at_most(min(delays), TAIL_MS))
        yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=5)
