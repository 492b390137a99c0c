"""``python -m det_core.launch.tensorflow``: one process on each machine, which TensorFlow's ``TF_CONFIG`` joins."""

from __future__ import annotations

import json
import os

from . import _framework
from ._framework import Framework, Job
from ._machines._ports import check_free
from ._words._options import UsageError
from ._words._parser import Parser, port

__all__ = ["main"]

PORT = 29400
"""As the wire contract says, section 14.4."""
HELP = """\
usage: python -m det_core.launch.tensorflow [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] -m package.module [ARGS...]

Starts one process on this machine, which is to use all of its GPUs. With several machines one launcher runs on each,
and the environment variable TF_CONFIG tells every process where the others are, as tf.distribute's
MultiWorkerMirroredStrategy reads it. And besides:
  every line of output starts with [rank=N];
  SIGTERM or Ctrl-C reaches the script once, and it has --grace seconds to save;
  the exit status is the script's; its last lines are shown again if it fails; and nothing outlives the launcher.
A script gets its ranks, and that strategy, from core.DistributedContext.from_tf_config().

examples:
  # one machine
  python -m det_core.launch.tensorflow train.py --lr 0.1

  # two machines: the same command and the same secret on both; each finds itself by its name or address
  export DET_CORE_SECRET=...
  python -m det_core.launch.tensorflow --hosts node1,node2 train.py

where it runs, unless options say so:
  in an allocation of a master, its containers; in a job of Slurm, its nodes (start one launcher on each:
  srun --ntasks-per-node=1); else this machine

options of this launcher:
  --hosts NAME,NAME      the machines; or --hostfile FILE, with a name on each line
  --node-rank R          which of them this one is, from 0 on, if its name does not tell
  --port P               where each of them listens for the others (default: C10D_PORT, else 29400)
  -m, --module           run a module, as python -m does
  --no-python            run the script as a command, whatever it is
  --grace SECONDS        how long the script may take to save and exit after SIGTERM, Ctrl-C or SIGHUP;
                         what still runs then is killed (default: DET_CORE_GRACE, else 60)
  --tail LINES           how many of the last lines of a script that failed are shown at the end (default: 20)

The first word that is no option is the script; all after it is the script's, and so is a later --.
"""


def add_options(parser: Parser) -> None:
    """The wire contract's spelling."""
    parser.add_argument("--port", dest="master_port", type=port)


def command(job: Job) -> list[str]:
    """The wrapper itself: TensorFlow has no launcher."""
    place = job.place
    if job.asked.nproc_per_node not in (None, 1):
        raise UsageError(f"--nproc-per-node {job.asked.nproc_per_node}: TensorFlow has one process on each machine")
    if job.theirs:
        raise UsageError(f"unknown option: {job.theirs[0]} (see --help)")
    if place.several and not place.known:
        raise UsageError("every machine has to know all others: name them with --hosts A,B or --hostfile FILE")
    os.environ.pop("TF_CONFIG", None)
    if place.several:
        meet = job.asked.master_port or int(os.environ.get("C10D_PORT") or PORT)
        check_free(meet)
        os.environ["TF_CONFIG"] = tf_config([host.name for host in place.hosts], meet, place.node_rank)
    os.environ["DET_CORE_RANK"] = str(place.node_rank)
    return job.wrapped


def tf_config(hosts: list[str], port: int, index: int) -> str:
    """The variable for the worker ``index``."""
    workers = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


FRAMEWORK = Framework(
    name="tensorflow",
    program="the wrapper",
    help=HELP,
    rank_variables="DET_CORE_RANK",
    one_for_all=False,
    one_per_machine=True,
    command=command,
    add_options=add_options,
)


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    return _framework.run(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
