"""``python -m det_core.launch.tensorflow``: one process on each node, connected by TensorFlow's ``TF_CONFIG``."""

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
"""Default port of the wire contract, section 14.4."""
HELP = f"""\
usage: python -m det_core.launch.tensorflow [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.tensorflow [OPTIONS] -m package.module [ARGS...]

Starts one process on this node, which uses all of its GPUs. With several nodes one launcher runs on each, and the
environment variable TF_CONFIG names the addresses of all processes, as tf.distribute's MultiWorkerMirroredStrategy
reads it:
{BEHAVIOR}
A script gets its ranks, and that strategy, from core.DistributedContext.from_tf_config().

examples:
  # one node
  python -m det_core.launch.tensorflow train.py --lr 0.1

  # two nodes: the same command and the same secret on both; each finds itself by its name or address
  export DET_CORE_SECRET=...
  python -m det_core.launch.tensorflow --hosts node1,node2 train.py

options (--port P: port where each node listens for the others; default: C10D_PORT, else {PORT}):
"""


def one_per_node(layout: Layout, command_line: CommandLine) -> Layout:
    """Return the layout with one rank on each node, and TensorFlow's port."""
    if command_line.options.nproc_per_node not in (None, 1):
        raise UsageError(
            f"--nproc-per-node {command_line.options.nproc_per_node}: TensorFlow runs one process on each node"
        )
    if layout.multi_node and not layout.hosts_are_addresses:
        raise UsageError("TensorFlow needs the names of all nodes: pass them with --hosts A,B or --hostfile FILE")
    hosts = tuple(replace(host, slots=1) for host in layout.hosts)
    port = command_line.options.master_port or int(os.environ.get("C10D_PORT") or PORT)
    return replace(layout, hosts=hosts, port=port, notice="")


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """Return ``TF_CONFIG``; no variable on a single node."""
    if not layout.multi_node:
        return [{}]
    reserve(layout.port).close()  # a port in use is one line here, and many of TensorFlow's
    return [{"TF_CONFIG": tf_config([host.name for host in layout.hosts], layout.port, layout.node_rank)}]


def tf_config(hosts: list[str], port: int, index: int) -> str:
    """Return the value of ``TF_CONFIG`` for the worker ``index``."""
    workers = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


def add_options(parser: Parser) -> None:
    """Add the wire contract's spelling."""
    parser.add_argument("--port", dest="master_port", type=port)


FRAMEWORK = Framework("tensorflow", HELP, variables, adjust=one_per_node, add_options=add_options, unset=("TF_CONFIG",))


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: this process's) and return its exit status."""
    return launch(FRAMEWORK, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
