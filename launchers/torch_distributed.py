"""``python -m det_core.launch.torch_distributed``: one process per GPU, with the variables that ``torchrun`` sets."""

from __future__ import annotations

import os

from det_core._env import Environment

from ._cli import BEHAVIOR, CommandLine, Framework, Parser, launch
from ._hosts import Layout
from ._ports import reserve_master_port

__all__ = ["main"]

HELP = f"""\
usage: python -m det_core.launch.torch_distributed [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.torch_distributed [OPTIONS] -- --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else --nproc-per-node) with the variables that torchrun gives its ranks:
{BEHAVIOR}
examples:
  # as many processes as there are GPUs
  python -m det_core.launch.torch_distributed train.py --lr 0.1

  # four processes, ten minutes to save after SIGTERM
  python -m det_core.launch.torch_distributed --nproc-per-node 4 --grace 600 train.py

  # two nodes: the same command on both except for --node-rank, and the same secret
  export DET_CORE_SECRET=...
  python -m det_core.launch.torch_distributed --nnodes 2 --node-rank 0 --master-addr HOST train.py

  # restarts and elastic jobs are torchrun's own
  torchrun --max-restarts 3 --no-python python -m det_core.launch.wrap_rank RANK train.py

options (torchrun's --standalone has no effect: it is the default):
"""


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """Return the variables of ``LocalElasticAgent._start_workers`` in torch's elastic agent, without restarts."""
    slots = layout.this_host.slots
    common = {
        "MASTER_ADDR": layout.chief,
        "MASTER_PORT": str(reserve_master_port(layout)),
        "USE_TORCH_DISTRIBUTED": "True",
        "WORLD_SIZE": str(layout.size),
        "LOCAL_WORLD_SIZE": str(slots),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(len(layout.hosts)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(layout.size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, as no agent does
        # Without it a rank waits forever in NCCL for one that was lost.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if slots > 1:  # by default OpenMP starts a thread per processor in every rank
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    ranks = [(str(layout.first_rank + local), str(local)) for local in range(slots)]
    return [{**common, "RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local} for rank, local in ranks]


def add_options(parser: Parser) -> None:
    """Add the one of torchrun's options that many scripts pass."""
    parser.add_argument("--standalone", action="store_true")


FRAMEWORK = Framework(
    "torch_distributed",
    HELP,
    variables,
    add_options=add_options,
    unknown="; options of torchrun: torchrun … --no-python python -m det_core.launch.wrap_rank RANK …",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: this process's) and return its exit status."""
    return launch(FRAMEWORK, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
