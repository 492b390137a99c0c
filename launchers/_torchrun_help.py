"""What ``--help`` of the torch_distributed launcher prints."""

from __future__ import annotations

import os

from det_core._optional import require
from det_core.errors import MissingExtra

HELP = """\
usage: python -m det_core.launch.torch_distributed [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] -- --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else --nproc-per-node) with torchrun's own agent and options, and besides:
  every line of output starts with [rank=N], and no line is cut by another rank's;
  SIGTERM or Ctrl-C reaches each script once, and all have --grace seconds to save;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; and nothing of the job outlives the launcher.

examples:
  # as many processes as there are GPUs
  python -m det_core.launch.torch_distributed train.py --lr 0.1

  # four processes, ten minutes to save when the job is told to stop
  python -m det_core.launch.torch_distributed --nproc-per-node 4 --grace 600 train.py

  # two machines: the same on both but for --node-rank, and the same secret on both
  export DET_CORE_SECRET=...
  python -m det_core.launch.torch_distributed --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 train.py

options of this launcher:
  --grace SECONDS   how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP;
                    what still runs then is killed (default: DET_CORE_GRACE, else 60)
  --tail LINES      how many of the last lines of the first failed rank are shown at the end (default: 20)
  --verbose         show the messages of torchrun's agent too (by default only if the agent itself fails)

The first word that is no option is the script; all after it is the script's, and so is a later --.
"""


def print_help() -> None:
    """Print our own help at once, and torchrun's as soon as it is loaded."""
    try:
        print(HELP, flush=True)
        print(_theirs(), flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _theirs() -> str:
    try:
        torchrun = require("torch.distributed.run", extra="torch", purpose="torchrun")
    except MissingExtra as e:
        return f"torchrun's options are not known here: {e}"
    described: str = torchrun.get_args_parser().format_help()
    return "options of torchrun:\n" + described.partition("options:\n")[2]
