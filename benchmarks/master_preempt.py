"""From the pause request's arrival to ``should_preempt()`` being True in the script of a trial.

Run it with ``python -m benchmarks.master_preempt``. One experiment on this machine is paused and activated again and
again; its script asks ``should_preempt()`` every tenth of a millisecond and notes the moment it is told to stop. The
clock starts when the request is sent, so its way to the master counts too.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks._master import Api, Master, running
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

ROUNDS = quick(20, 1)
BOUND = 0.050
"""Seconds, at the median."""
SCRIPT = """
import os, time
from pathlib import Path
from det_core import core
folder = Path(os.environ["BENCH"])
with core.init() as context:
    context.preempt.should_preempt()
    (folder / "began").touch()
    while not context.preempt.should_preempt(auto_ack=AUTO_ACK):
        time.sleep(0.0001)
    told = time.time()
    if not AUTO_ACK:
        context.preempt.acknowledge_preemption_signal()
    (folder / "aside").write_text(repr(told))
    (folder / "aside").rename(folder / "told")
"""


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    with running("--slots", "1") as master:
        delays, alone = (_measure(master, auto_ack) for auto_ack in (True, False))
    middle = statistics.median(delays)
    rows = [
        ("median, with the acknowledgement that the call sends first", middle * 1e3, BOUND * 1e3, middle <= BOUND),
        ("best", min(delays) * 1e3, None, None),
        ("worst", max(delays) * 1e3, None, None),
        ("median with auto_ack=False", statistics.median(alone) * 1e3, None, None),
    ]
    title = f"milliseconds from the pause request to should_preempt() being True, {ROUNDS} times"
    print_table(title, ("", "ms", "bound", "met"), rows)
    return int(middle > BOUND)


def _measure(master: Master, auto_ack: bool) -> list[float]:
    """The delays of some pauses, in seconds."""
    api, folder = master.api(), master.home / f"bench-{auto_ack}"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT.replace("AUTO_ACK", str(auto_ack)))
    config = {
        "name": "preempt",
        "entrypoint": f"python {folder / 'script.py'}",
        "environment": {"environment_variables": [f"BENCH={folder}"]},
        "searcher": {"name": "single", "metric": "loss", "max_length": 1},
        "max_restarts": 0,
    }
    experiment = api.ask("POST", "experiments", {"config": config})["experiment"]["id"]
    delays = [_round(api, experiment, folder) for _ in range(ROUNDS)]
    api.ask("POST", f"experiments/{experiment}/kill")
    return delays


def _round(api: Api, experiment: int, folder: Path) -> float:
    """The delay of one pause, in seconds."""
    _wait(folder / "began")
    time.sleep(0.2)  # the poll that waits is there
    sent = time.time()
    api.ask("POST", f"experiments/{experiment}/pause")
    _wait(folder / "told")
    delay = float((folder / "told").read_text()) - sent
    (folder / "began").unlink()
    (folder / "told").unlink()
    api.ask("POST", f"experiments/{experiment}/activate")
    return delay


def _wait(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the trial has not written {path.name} within 60 s")
        time.sleep(0.002)


if __name__ == "__main__":
    raise SystemExit(status(main()))
