"""``python -m det_core.launch.tensorflow``: one process on each machine, which TensorFlow's ``TF_CONFIG`` joins."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from det_core._env import Environment

from ._cli import BEHAVIOR, CommandLine, Framework, Parser, launch, port
from ._hosts import Layout, UsageError
from ._ports import reserve

__all__ = ["main"]

PORT = 29400
"""As the wire contract says, section 14.4."""
HELP = f"""\
usage: python -m det_core.launch.tensorflow [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] -m package.module [ARGS...]

Starts one process on this machine, which is to use all of its GPUs. With several machines one launcher runs on each,
and the environment variable TF_CONFIG tells every process where the others are, as tf.distribute's
MultiWorkerMirroredStrategy reads it. And besides:
{BEHAVIOR}
A script gets its ranks, and that strategy, from core.DistributedContext.from_tf_config().

examples:
  # one machine
  python -m det_core.launch.tensorflow train.py --lr 0.1

  # two machines: the same command and the same secret on both; each finds itself by its name or address
  export DET_CORE_SECRET=...
  python -m det_core.launch.tensorflow --hosts node1,node2 train.py

options (--port P is where each machine listens for the others; default: C10D_PORT, else {PORT}):
"""


def one_per_machine(layout: Layout, command_line: CommandLine) -> Layout:
    """The place with one rank on each machine, and TensorFlow's port."""
    if command_line.options.nproc_per_node not in (None, 1):
        raise UsageError(
            f"--nproc-per-node {command_line.options.nproc_per_node}: TensorFlow has one process on each machine"
        )
    if layout.multi_node and not layout.hosts_are_addresses:
        raise UsageError("every machine has to know all others: name them with --hosts A,B or --hostfile FILE")
    hosts = tuple(replace(host, slots=1) for host in layout.hosts)
    meet = command_line.options.master_port or int(os.environ.get("C10D_PORT") or PORT)
    return replace(layout, hosts=hosts, port=meet, notice="")


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """The cluster, where there is one."""
    if not layout.multi_node:
        return [{}]
    reserve(layout.port).close()  # where it is in use, that is one line here, and many of TensorFlow's
    return [{"TF_CONFIG": tf_config([host.name for host in layout.hosts], layout.port, layout.node_rank)}]


def tf_config(hosts: list[str], port: int, index: int) -> str:
    """The variable for the worker ``index``."""
    workers = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def add_options(parser: Parser) -> None:
    """The wire contract's spelling."""
    parser.add_argument("--port", dest="master_port", type=port)


FRAMEWORK = Framework(
    "tensorflow", HELP, variables, adjust=one_per_machine, add_options=add_options, unset=("TF_CONFIG",)
)


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    return launch(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
