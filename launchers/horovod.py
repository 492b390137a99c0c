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
from det_core._standalone.processes import signal_at_parents_death

from . import _await_host
from ._cli import BEHAVIOR, CommandLine, Framework, Parser, launch, number
from ._hosts import CannotStart, Host, Layout, UsageError
from ._ports import reserve

__all__ = ["main"]

HELP = f"""\
usage: python -m det_core.launch.horovod [OPTIONS] script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] [OPTIONS OF HOROVODRUN] -- script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else -np) with the variables that horovodrun --gloo gives its ranks, and besides:
{BEHAVIOR}
examples:
  # as many processes as there are GPUs
  python -m det_core.launch.horovod train.py

  # four processes, and an option of horovodrun
  python -m det_core.launch.horovod -np 4 --cycle-time-ms 3.5 -- train.py

  # two machines: the same command and the same secret on both; each finds itself by its name or address
  export DET_CORE_SECRET=...
  python -m det_core.launch.horovod --hosts node1:4,node2:4 train.py

options (-np N is how many processes there are on all machines together; --autohorovod runs the script as it stands,
without horovod, if that is one; of horovodrun's options those count that tune or log, none that says where it runs):
"""
_START_TIMEOUT = 1200.0
"""Seconds for the first machine's launcher to be up: horovodrun's --start-timeout in the wire contract."""
_GLOO_TIMEOUT = 240
"""Seconds that ranks wait for each other: its --gloo-timeout-seconds there."""


def variables(layout: Layout, command_line: CommandLine, environment: Environment) -> list[dict[str, str]]:
    """As horovod's ``runner/gloo_run.py`` sets them; see the wire contract, section 14.2."""
    if command_line.options.autohorovod and layout.size == 1:
        os.execvp(command_line.command[0], command_line.command)
    check_installed("horovod", extra="horovod", purpose="this launcher")
    hosts, gloo_run = _of_horovod("common.util.hosts"), _of_horovod("gloo_run")
    text = ",".join(f"{host.name if layout.multi_node else 'localhost'}:{host.slots}" for host in layout.hosts)
    plan = hosts.get_host_assignments(hosts.parse_hosts(text), layout.size)
    chosen, interfaces = _chosen(
        ["--gloo-timeout-seconds", str(_GLOO_TIMEOUT), *_of_the_trial(), *command_line.framework_options]
    )
    interfaces = interfaces or [_interface(layout)]
    common = {
        **chosen,
        "USE_HOROVOD": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": _address(layout.chief),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_rendezvous(plan, layout)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interfaces[0],
        "NCCL_SOCKET_IFNAME": ",".join(interfaces),
    }
    mine = plan[layout.first_rank :][: layout.this_host.slots]
    return [{**common, **gloo_run.create_slot_env_vars(slot)} for slot in mine]


def _of_horovod(module: str) -> Any:
    """A part of horovodrun, which loads without torch."""
    return require(f"horovod.runner.{module}", extra="horovod", purpose="this launcher")


def _chosen(options: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that horovodrun makes of its options, and the network interfaces that they name."""
    parser, argv, said = _of_horovod("launch"), sys.argv, io.StringIO()
    sys.argv = ["horovodrun", "-np", "1", *options, "true"]  # where it reads them, and nowhere else
    try:
        with contextlib.redirect_stderr(said):
            asked = parser.parse_args()
    except SystemExit:
        lines = said.getvalue().splitlines() or ["its options cannot be read"]
        raise UsageError(f"{lines[-1]} (horovodrun --help shows its options)") from None
    finally:
        sys.argv = argv
    return _of_horovod("common.util.config_parser").set_env_from_args({}, asked), sorted(asked.nics or ())


def _rendezvous(plan: list[Any], layout: Layout) -> int:
    """The port of horovod's own server, by which ranks learn each other's addresses: a child of the first launcher."""
    if layout.node_rank:
        return layout.port
    if layout.multi_node:
        reserve(layout.port).close()
    server = _of_horovod("http.http_server")
    at = ("", layout.port) if layout.multi_node else ("127.0.0.1", 0)
    httpd = server.RendezvousHTTPServer(at, server.RendezvousHandler, 0)
    httpd.init(plan)
    launcher = os.getpid()
    if os.fork() == 0:
        signal_at_parents_death(signal.SIGKILL)
        os.setsid()  # a Ctrl-C at the terminal is not for it
        try:
            if os.getppid() == launcher:
                httpd.serve_forever()
        finally:
            os._exit(1)
    port = int(httpd.server_address[1])
    httpd.socket.close()
    return port


def command(layout: Layout, script: list[str]) -> list[str]:
    """Return the command of each rank: it runs the script once the rendezvous answers, without which ranks give up."""
    if not layout.node_rank:
        return script
    where = [f"{_START_TIMEOUT:g}", layout.chief, str(layout.port)]
    return [sys.executable, "-I", "-S", _await_host.__file__, *where, *script]


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as e:
        raise CannotStart(f"host {name} has no address: {e.strerror}") from e


def _interface(layout: Layout) -> str:
    """The network interface by which this machine reaches the first one; on that one, by which it reaches the last."""
    if not layout.multi_node:
        return "lo"
    import psutil  # horovod needs it, too

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_address(layout.hosts[0 if layout.node_rank else -1].name), 9))  # no packet is sent
        own = probe.getsockname()[0]
    names = [name for name, found in psutil.net_if_addrs().items() if own in (each.address for each in found)]
    return names[0] if names else "lo"


def limit_to_np(layout: Layout, command_line: CommandLine) -> Layout:
    """The place with as many ranks in all as ``-np`` says; the first machines get as many as they have slots."""
    if (ranks := command_line.options.processes) is None:
        return layout
    if layout.source == "this node":
        return replace(layout, hosts=(replace(layout.this_host, slots=ranks),), notice="")
    if ranks > layout.size:
        raise UsageError(f"{ranks} processes are asked for, and {layout.source} has {layout.size} slots")
    hosts: list[Host] = []
    for host in layout.hosts:
        if slots := min(host.slots, ranks - sum(h.slots for h in hosts)):
            hosts.append(replace(host, slots=slots))
    if layout.node_rank >= len(hosts):
        raise UsageError(f"-np {ranks} leaves no process for this node, {layout.this_host.name}")
    return replace(layout, hosts=tuple(hosts), notice="")


def require_host_names(layout: Layout, command_line: CommandLine) -> Layout:
    """The place that ``-np`` fills, whose machines have to be known by name."""
    if layout.multi_node and not layout.hosts_are_addresses:
        raise UsageError("every machine has to know all others: name them with --hosts A:2,B:2 or --hostfile FILE")
    return limit_to_np(layout, command_line)


def _of_the_trial() -> list[str]:
    """What the experiment's config says about horovod, as options of horovodrun."""
    info = get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return []
    config: dict[str, Any] = info.trial.config
    chosen = config.get("optimizations") or {}
    options = ["--cache-capacity", "1024", "--no-hierarchical-allreduce", "--no-hierarchical-allgather"]
    if chosen.get("auto_tune_tensor_fusion"):
        options += ["--autotune", "--autotune-log-file", "/tmp/autotune_log.csv"]
    else:
        options += ["--fusion-threshold-mb", str(chosen.get("tensor_fusion_threshold", 64))]
        options += ["--cycle-time-ms", str(chosen.get("tensor_fusion_cycle_time", 1))]
    interface = info.trial.inter_node_network_interface
    if interface and len(info.container_addrs) > 1:
        options += ["--network-interface", interface]
    return options + [str(word) for word in (config.get("data") or {}).get("__det_dtrain_args", [])]


def add_options(parser: Parser) -> None:
    """The spellings of horovodrun."""
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


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    return launch(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
