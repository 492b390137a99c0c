"""``plain_agent.py [--grace S] [--tail N] RANKS COMMAND…``: the least that an agent can be, under our launcher.

As torchrun's, it starts the wrappers in sessions of their own and sends SIGTERM to the others when one has failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from det_core.launch._supervisor._agent import Control
from det_core.launch._supervisor._launch import launch
from det_core.launch._words._options import UsageError, add_options, read_options
from det_core.launch._wrapper import command


def run_agent(control: Control, path: str) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, None)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--break-down", action="store_true")
    parser.add_argument("ranks", type=int)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.ranks < 1:
        raise UsageError("RANKS has to be above 0")
    print("a message of the agent", file=sys.stderr)
    time.sleep(args.delay)
    control.plan(args.ranks, read_options(args))
    wrappers = [
        subprocess.Popen(
            command(path, "MY_RANK,RANK", args.words), env={**os.environ, "RANK": str(rank)}, start_new_session=True
        )
        for rank in range(args.ranks)
    ]
    if args.break_down:
        raise ConnectionError("the agent lost its way")
    while (states := [wrapper.poll() for wrapper in wrappers]) and None in states and not any(states):
        time.sleep(0.05)
    for wrapper in wrappers:
        if wrapper.poll() is None:
            os.killpg(wrapper.pid, signal.SIGTERM)
    for wrapper in wrappers:
        wrapper.wait()
    control.done()


if __name__ == "__main__":
    raise SystemExit(launch("the plain agent", run_agent))
