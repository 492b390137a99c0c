"""``python -m det_core.launch.deepspeed``: one process per GPU, under deepspeed's own launcher on each machine."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping

from det_core._optional import demand

from . import _framework
from ._framework import Framework, Job
from ._machines._hosts import Host, write_hostfile
from ._machines._ports import check_free, check_reachable, free_port
from ._words._parser import Parser, count
from ._wrapper._rank import GPUS

__all__ = ["main"]

HELP = """\
usage: python -m det_core.launch.deepspeed [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] --trial model_def:MyTrial [--config FILE ...]
       python -m det_core.launch.deepspeed [OPTIONS] [OPTIONS OF deepspeed] -- script.py [ARGS...]

Starts one process per GPU (else --nproc-per-node) with deepspeed's own launcher, one on each machine, and besides:
  every line of output starts with [rank=N], and no line is cut by another rank's;
  SIGTERM or Ctrl-C reaches each script once, and all have --grace seconds to save;
  when one rank fails the others have --grace seconds to end;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; and nothing of the job outlives the launcher.

examples:
  # as many processes as there are GPUs
  python -m det_core.launch.deepspeed train.py --lr 0.1

  # four processes on a machine without a GPU
  python -m det_core.launch.deepspeed --nproc-per-node 4 train.py

  # two machines: the same on both but for --node-rank, and the same secret on both
  export DET_CORE_SECRET=...
  python -m det_core.launch.deepspeed --nnodes 2 --node-rank 0 --master-addr HOST train.py

  # the same with a hostfile, in which each machine finds itself by its name or address
  python -m det_core.launch.deepspeed --hostfile hosts.txt train.py

  # an option of deepspeed's launcher: a -- stands before the script then
  python -m det_core.launch.deepspeed --bind_cores_to_rank -- train.py

where it runs, unless options say so:
  in an allocation of a master, its containers and slots; in a job of Slurm, its nodes (start one launcher on each:
  srun --ntasks-per-node=1); under mpirun, one machine per process of it; else this machine

options of this launcher:
  --nproc-per-node N, --num_gpus N   processes on each machine (default: one per slot or GPU)
  --nnodes N --node-rank R           how many machines, and which one this is, from 0 on
  --hostfile FILE, -H FILE           the machines, as lines of `NAME slots=N`; or --hosts NAME:N,NAME:N
  --master-addr HOST                 the address of the first machine (default: its name in the hostfile)
  --master-port PORT                 where the ranks meet (default: a free one on one machine, else 29500)
  -m, --module                       run a module, as python -m does
  --no-python                        run the script as a command, whatever it is
  --grace SECONDS                    how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP, or when
                                     another rank has failed; what still runs then is killed
                                     (default: DET_CORE_GRACE, else 60)
  --tail LINES                       how many of the last lines of the first failed rank to show (default: 20)
  --verbose                          show the messages of deepspeed's launcher too (by default only if it fails itself)

The first word that is no option is the script; all after it is the script's, and so is a later --.
"""


def add_options(parser: Parser) -> None:
    """The spellings of deepspeed's launcher."""
    parser.add_argument("-H", dest="hostfile")
    parser.add_argument("--num_gpus", "--num_accelerators", "--num-gpus", dest="nproc_per_node", type=count)
    parser.add_argument("--num_nodes", "--num-nodes", dest="nnodes", type=count)


def command(job: Job) -> list[str]:
    """Its command line."""
    demand("deepspeed", "torch", extra="deepspeed", purpose="this launcher")
    words = program_words(job)
    os.environ.update(variables(job, os.environ))
    return words


def program_words(job: Job) -> list[str]:
    """The words: always with the slots, since without them it counts GPUs, and on a CPU sockets."""
    place = job.place
    port = place.port
    if not place.several and job.asked.master_port is None:
        port = free_port()  # so that two jobs on one machine do not meet
    elif place.node_rank == 0:
        check_free(port)
    else:
        check_reachable(place.chief, port)
    names = [host.name for host in place.hosts] if place.several else ["localhost"]
    hosts = [Host(name, host.slots) for name, host in zip(names, place.hosts, strict=True)]
    hostfile = write_hostfile(_hostfile(job), hosts)
    if job.theirs:  # which only its front end knows all of
        front = ["deepspeed.launcher.runner", "--hostfile", hostfile, "--no_ssh"]
    else:  # the front end would import deepspeed, and then start this, which does so again
        front = ["deepspeed.launcher.launch", "--world_info", _world_info(hosts)]
    return [
        *(sys.executable, "-m", *front),
        *("--node_rank", str(place.node_rank), "--master_addr", place.chief, "--master_port", str(port)),
        *("--no_python", "--no_local_rank"),
        *job.theirs,
        *job.wrapped,
    ]


def _world_info(hosts: list[Host]) -> str:
    """The machines and their slots, as deepspeed's front end tells them to its launcher on each machine."""
    slots = {host.name: list(range(host.slots)) for host in hosts}
    return base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()


def variables(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """What its ranks get besides ``environ``; see the wire contract, section 14.3."""
    found = {"USE_DEEPSPEED": "1"}
    if job.place.several:
        found["DET_DEEPSPEED_HOSTFILE_PATH"] = _hostfile(job)
    interface = environ.get("DET_INTER_NODE_NETWORK_INTERFACE", "")
    if job.environment.cuda_visible_devices and interface and not environ.get("NCCL_SOCKET_IFNAME", "").strip():
        found["NCCL_SOCKET_IFNAME"] = interface
    if job.environment.cuda_visible_devices is not None:
        found[GPUS] = job.environment.cuda_visible_devices  # deepspeed would count them from 0 on
    return found


def _hostfile(job: Job) -> str:
    return f"{job.folder}/hosts"


FRAMEWORK = Framework(
    name="deepspeed",
    program="deepspeed's launcher",
    help=HELP,
    rank_variables="RANK",
    one_for_all=False,
    own_parser=True,
    command=command,
    add_options=add_options,
)


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    return _framework.run(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
