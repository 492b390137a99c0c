"""From the pause request's arrival to ``should_preempt()`` being True in the script of a trial.

One experiment on this machine is paused and activated again and again; its script asks ``should_preempt()`` every tenth
of a millisecond and notes the moment of the stop. The clock starts when the request is sent, so its way to the
master counts too.
"""

import statistics
import time

from benchmarks._bench import Args, Table, Tables, at_most, program
from benchmarks._master import Master, running, until

BOUND_MS = 50.0  # at the median
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
    stopped = time.time()
    if not AUTO_ACK:
        context.preempt.acknowledge_preemption_signal()
    (folder / "aside").write_text(repr(stopped))
    (folder / "aside").rename(folder / "stopped")
"""


def measure(args: Args) -> Tables:
    with running(1) as master:
        delays, alone = (pauses(master, auto_ack, args.rounds) for auto_ack in (True, False))
    middle = statistics.median(delays)
    title = f"milliseconds from the pause request to should_preempt() being True, {args.rounds} times"
    table = Table(title, ["median", "best", "worst"])
    name = "with the acknowledgement that the call sends first"
    table.row(name, middle, min(delays), max(delays), bound=at_most(middle, BOUND_MS))
    table.row("with auto_ack=False", statistics.median(alone), min(alone), max(alone))
    yield table


def pauses(master: Master, auto_ack: bool, rounds: int) -> list[float]:
    """Return the delays of some pauses in milliseconds."""
    api = master.api()
    folder = master.home / f"bench-{auto_ack}"
    folder.mkdir()
    began = folder / "began"
    stopped = folder / "stopped"
    delays = []
    (folder / "script.py").write_text(SCRIPT.replace("AUTO_ACK", str(auto_ack)))
    experiment = api.create({
        "name": "preempt",
        "entrypoint": f"python {folder / 'script.py'}",
        "environment": {"environment_variables": [f"BENCH={folder}"]},
        "searcher": {"name": "single", "metric": "loss", "max_length": 1},
        "max_restarts": 0,
    })  # fmt: skip
    for _ in range(rounds):
        until(began.exists)
        time.sleep(0.2)  # the poll that waits is there
        # The wall clock, as the script notes the stop in another process.
        sent = time.time()
        api.ask("POST", f"experiments/{experiment}/pause")
        until(stopped.exists)
        delays.append((float(stopped.read_text()) - sent) * 1e3)
        began.unlink()
        stopped.unlink()
        api.ask("POST", f"experiments/{experiment}/activate")
    # It would hold the only slot, for which the experiment of the second row waits.
    api.ask("POST", f"experiments/{experiment}/kill")
    return delays


if __name__ == "__main__":
    program(measure, __doc__, rounds=20)
