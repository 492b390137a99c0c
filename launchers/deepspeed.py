"""``python -m det_core.launch.deepspeed``: one process per GPU, with the variables that deepspeed's launcher sets."""

from __future__ import annotations

import os

from det_core._env import Environment
from det_core._optional import check_installed

from ._cli import BEHAVIOR, CommandLine, Framework, Parser, launch, number
from ._hosts import Layout
from ._ports import reserve_master_port

__all__ = ["main"]

HELP = f"""\
usage: python -m det_core.launch.deepspeed [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.deepspeed [OPTIONS] --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else --num_gpus) with the variables that deepspeed's launcher gives its ranks:
{BEHAVIOR}
examples:
  # as many processes as there are GPUs
  python -m det_core.launch.deepspeed train.py --lr 0.1

  # four processes on a node without a GPU
  python -m det_core.launch.deepspeed --num_gpus 4 train.py

  # two nodes, with a hostfile in which each finds itself; the same secret on both
  export DET_CORE_SECRET=...
  python -m det_core.launch.deepspeed --hostfile hosts.txt train.py

options (deepspeed's -H, --num_gpus and --num_nodes mean --hostfile, --nproc-per-node and --nnodes):
"""


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """Return the variables of deepspeed's ``launcher/launch.py``; see the wire contract, section 14.3."""
    check_installed("deepspeed", "torch", extra="deepspeed", purpose="this launcher")
    slots = layout.this_host.slots
    common = {
        "MASTER_ADDR": layout.chief,
        "MASTER_PORT": str(reserve_master_port(layout)),
        "USE_DEEPSPEED": "1",
        "WORLD_SIZE": str(layout.size),
        "LOCAL_SIZE": str(slots),
        "CROSS_RANK": str(layout.node_rank),
        "CROSS_SIZE": str(len(layout.hosts)),
    }
    interface = os.environ.get("DET_INTER_NODE_NETWORK_INTERFACE", "")
    if environment.cuda_visible_devices and interface and not os.environ.get("NCCL_SOCKET_IFNAME", "").strip():
        common["NCCL_SOCKET_IFNAME"] = interface
    return [{**common, "RANK": str(layout.first_rank + local), "LOCAL_RANK": str(local)} for local in range(slots)]


def add_options(parser: Parser) -> None:
    """Add the spellings of deepspeed's launcher."""
    count = number("a number", 1)
    parser.add_argument("-H", dest="hostfile")
    parser.add_argument("--num_gpus", "--num_accelerators", "--num-gpus", dest="nproc_per_node", type=count)
    parser.add_argument("--num_nodes", "--num-nodes", dest="nnodes", type=count)


FRAMEWORK = Framework("deepspeed", HELP, variables, add_options=add_options, hostfile="DET_DEEPSPEED_HOSTFILE_PATH")


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: this process's) and return its exit status."""
    return launch(FRAMEWORK, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
