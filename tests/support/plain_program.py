"""``plain_program.py [OPTIONS] [OPTIONS OF THE PROGRAM] -- SCRIPT…``: the least framework with a program of its own.

As mpirun, the program speaks on stdout, and kills all other ranks at once when one of them has failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PROGRAM = "program"


def program(ranks: int, how: list[str], command: list[str]) -> int:
    """Start the ranks and wait for them."""
    print("the program says hello", flush=True)
    if "--breaks" in how:
        print("the program lost its way", file=sys.stderr)
        return 3
    if "--leaves" in how:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, start_new_session=False, preexec_fn=os.setpgrp)
        for rank in range(ranks)
    ]
    while (states := [process.poll() for process in started]) and None in states and not any(states):
        time.sleep(0.02)
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if "--stays" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    return 1 if any(process.wait() for process in started) else 0


def main() -> int:
    """The launcher around it."""
    from det_core.launch._framework import Framework, Job, run
    from det_core.launch._supervisor import _supervisor

    _supervisor.AGENT_GRACE = 1.0  # for one that stays, ten seconds are as good as one

    def command(job: Job) -> list[str]:
        ranks = str(job.place.here.slots)
        return [sys.executable, __file__, PROGRAM, ranks, *job.theirs, "--", *job.wrapped]

    framework = Framework(
        name="plain", program="the plain program", help="", rank_variables="RANK", one_for_all=False, command=command
    )
    return run(framework)


if __name__ == "__main__":
    if sys.argv[1:2] == [PROGRAM]:
        end = sys.argv.index("--")
        raise SystemExit(program(int(sys.argv[2]), sys.argv[3:end], sys.argv[end + 1 :]))
    raise SystemExit(main())
