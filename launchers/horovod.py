"""``python -m det_core.launch.horovod``: one process per slot, with the variables that ``horovodrun --gloo`` sets."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from det_core._env import Environment
from det_core._info import get_cluster_info
from det_core._optional import check_installed, require
from det_core._standalone.processes import set_parent_death_signal

from . import _await_host
from ._cli import BEHAVIOR, CommandLine, Framework, Parser, launch, number
from ._hosts import CannotStart, Host, Layout, UsageError
from ._outcome import counted
from ._ports import reserve

__all__ = ["main"]

HELP = f"""\
usage: python -m det_core.launch.horovod [OPTIONS] script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] [OPTIONS OF HOROVODRUN] -- script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else -np) with the variables that horovodrun --gloo gives its ranks:
{BEHAVIOR}
examples:
  # as many processes as there are GPUs
  python -m det_core.launch.horovod train.py

  # four processes, and an option of horovodrun
  python -m det_core.launch.horovod -np 4 --cycle-time-ms 3.5 -- train.py

  # two nodes: the same command and the same secret on both; each finds itself by its name or address
  export DET_CORE_SECRET=...
  python -m det_core.launch.horovod --hosts node1:4,node2:4 train.py

options (-np N: number of processes on all nodes together; --autohorovod: run a single process without horovod;
horovodrun's options that tune or log have an effect, those that place its processes have none):
"""
_START_TIMEOUT = 1200.0
"""Maximum wait in seconds for node 0's launcher: horovodrun's --start-timeout in the wire contract."""
_GLOO_TIMEOUT = 240
"""Maximum wait in seconds of ranks for each other: its --gloo-timeout-seconds there."""


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """Return the variables of horovod's ``runner/gloo_run.py``; see the wire contract, section 14.2."""
    if command_line.options.autohorovod and layout.size == 1:
        os.execvp(command_line.command[0], command_line.command)
    check_installed("horovod", extra="horovod", purpose="this launcher")
    hosts = _import_runner("common.util.hosts")
    gloo_run = _import_runner("gloo_run")
    text = f"localhost:{layout.size}"
    if layout.multi_node:
        text = ",".join(f"{host.name}:{host.slots}" for host in layout.hosts)
    plan = hosts.get_host_assignments(hosts.parse_hosts(text), layout.size)
    tuning, interfaces = _parse_options(
        ["--gloo-timeout-seconds", str(_GLOO_TIMEOUT), *_trial_options(), *command_line.framework_options]
    )
    interfaces = interfaces or [_interface(layout)]
    common = {
        **tuning,
        "USE_HOROVOD": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": _address(layout.chief),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_start_rendezvous(plan, layout)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interfaces[0],
        "NCCL_SOCKET_IFNAME": ",".join(interfaces),
    }
    own = plan[layout.first_rank :][: layout.this_host.slots]
    return [{**common, **gloo_run.create_slot_env_vars(slot)} for slot in own]


def _import_runner(module: str) -> Any:
    """Import a part of horovodrun, which loads without torch."""
    return require(f"horovod.runner.{module}", extra="horovod", purpose="this launcher")


def _parse_options(options: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that horovodrun derives from its options, and the network interfaces among them."""
    launch = _import_runner("launch")
    argv = sys.argv
    stderr = io.StringIO()
    sys.argv = ["horovodrun", "-np", "1", *options, "true"]  # its parser takes no other argument
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = launch.parse_args()
    except SystemExit:
        lines = stderr.getvalue().splitlines() or ["invalid options of horovodrun"]
        raise UsageError(f"{lines[-1]} (horovodrun --help shows its options)") from None
    finally:
        sys.argv = argv
    tuning = _import_runner("common.util.config_parser").set_env_from_args({}, parsed)
    return tuning, sorted(parsed.nics or ())


def _start_rendezvous(plan: list[Any], layout: Layout) -> int:
    """Start horovod's server on node 0, where ranks learn each other's addresses, and return its port."""
    if layout.node_rank:
        return layout.port
    address = ("127.0.0.1", 0)
    if layout.multi_node:
        reserve(layout.port).close()
        address = ("", layout.port)
    server = _import_runner("http.http_server")
    httpd = server.RendezvousHTTPServer(address, server.RendezvousHandler, 0)
    httpd.init(plan)
    launcher = os.getpid()
    if os.fork() == 0:
        set_parent_death_signal(signal.SIGKILL)
        os.setsid()  # ranks that save after a Ctrl-C still need it
        try:
            if os.getppid() == launcher:
                httpd.serve_forever()
        finally:
            os._exit(1)
    port = int(httpd.server_address[1])
    httpd.socket.close()
    return port


def command(layout: Layout, script: list[str]) -> list[str]:
    """Return the command of each rank, which runs the script once the rendezvous answers."""
    if not layout.node_rank:
        return script
    # horovod's ranks give up at once if nothing answers.
    rendezvous = [f"{_START_TIMEOUT:g}", layout.chief, str(layout.port)]
    return [sys.executable, "-I", "-S", _await_host.__file__, *rendezvous, *script]


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as e:
        raise CannotStart(f"host {name} has no address: {e.strerror}") from e


def _interface(layout: Layout) -> str:
    """Return the network interface through which this node reaches node 0; on that one, the last node."""
    if not layout.multi_node:
        return "lo"
    import psutil  # a requirement of horovod

    peer = layout.hosts[0]
    if layout.node_rank == 0:
        peer = layout.hosts[-1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_address(peer.name), 9))  # chooses the route; no packet is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (entry.address for entry in addresses):
            return str(name)
    return "lo"


def limit_to_np(layout: Layout, command_line: CommandLine) -> Layout:
    """Return the layout with ``-np`` ranks in total; the first nodes get as many as they have slots."""
    if (ranks := command_line.options.processes) is None:
        return layout
    if layout.source == "this node":
        return replace(layout, hosts=(replace(layout.this_host, slots=ranks),), notice="")
    if ranks > layout.size:
        raise UsageError(f"-np {ranks}: {layout.source} has {counted(layout.size, 'slot')}")
    hosts: list[Host] = []
    for host in layout.hosts:
        if slots := min(host.slots, ranks - sum(h.slots for h in hosts)):
            hosts.append(replace(host, slots=slots))
    if layout.node_rank >= len(hosts):
        raise UsageError(f"-np {ranks}: leaves no process for this node, {layout.this_host.name}")
    return replace(layout, hosts=tuple(hosts), notice="")


def require_host_names(layout: Layout, command_line: CommandLine) -> Layout:
    """Return the layout limited to ``-np``.

    Raises:
        UsageError: If the names of other nodes are unknown, which horovod's plan needs.
    """
    if layout.multi_node and not layout.hosts_are_addresses:
        raise UsageError("horovod needs the names of all nodes: pass them with --hosts A:2,B:2 or --hostfile FILE")
    return limit_to_np(layout, command_line)


def _trial_options() -> list[str]:
    """Return the settings of the experiment's config as options of horovodrun."""
    info = get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return []
    config: dict[str, Any] = info.trial.config
    optimizations = config.get("optimizations") or {}
    options = ["--cache-capacity", "1024", "--no-hierarchical-allreduce", "--no-hierarchical-allgather"]
    if optimizations.get("auto_tune_tensor_fusion"):
        options += ["--autotune", "--autotune-log-file", "/tmp/autotune_log.csv"]
    else:
        options += ["--fusion-threshold-mb", str(optimizations.get("tensor_fusion_threshold", 64))]
        options += ["--cycle-time-ms", str(optimizations.get("tensor_fusion_cycle_time", 1))]
    interface = info.trial.inter_node_network_interface
    if interface and len(info.container_addrs) > 1:
        options += ["--network-interface", interface]
    return options + [str(word) for word in (config.get("data") or {}).get("__det_dtrain_args", [])]


def add_options(parser: Parser) -> None:
    """Add the spellings of horovodrun."""
    parser.add_argument("--autohorovod", action="store_true")
    parser.add_argument("-np", "--num-proc", dest="processes", type=number("a number", 1))
    parser.add_argument("-H", dest="hosts")
    parser.add_argument("-hostfile", dest="hostfile")


FRAMEWORK = Framework(
    "horovod",
    HELP,
    variables,
    adjust=require_host_names,
    command=command,
    add_options=add_options,
    program="horovodrun",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher with ``arguments`` (default: this process's) and return its exit status."""
    return launch(FRAMEWORK, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
