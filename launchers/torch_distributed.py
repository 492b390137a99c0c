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

Starts one process per GPU (else --nproc-per-node) with the variables that torchrun gives its ranks, and besides:
{BEHAVIOR}
examples:
  # as many processes as there are GPUs
  python -m det_core.launch.torch_distributed train.py --lr 0.1

  # four processes, ten minutes to save when the job is told to stop
  python -m det_core.launch.torch_distributed --nproc-per-node 4 --grace 600 train.py

  # two machines: the same on both but for --node-rank, and the same secret on both
  export DET_CORE_SECRET=...
  python -m det_core.launch.torch_distributed --nnodes 2 --node-rank 0 --master-addr HOST train.py

  # restarts and elastic jobs are torchrun's own
  torchrun --max-restarts 3 --no-python python -m det_core.launch.wrap_rank RANK train.py

options (torchrun's --standalone says what is so anyway):
"""


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """As ``LocalElasticAgent._start_workers`` of ``torch.distributed.elastic`` sets them for a job without restarts."""
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
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store, as there is no agent that does
        # Without it a rank that waits in NCCL for a lost one waits for good.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if slots > 1:  # else each would take all processors
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    ranks = [(str(layout.first_rank + local), str(local)) for local in range(slots)]
    return [{**common, "RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local} for rank, local in ranks]


def add_options(parser: Parser) -> None:
    """One of torchrun's that many scripts give."""
    parser.add_argument("--standalone", action="store_true")


FRAMEWORK = Framework(
    "torch_distributed",
    HELP,
    variables,
    add_options=add_options,
    unknown="; options of torchrun: torchrun … --no-python python -m det_core.launch.wrap_rank RANK …",
)


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    return launch(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
