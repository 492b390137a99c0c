"""``python -m det_core.launch.horovod``: one process per slot, under horovodrun with gloo."""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from det_core._info import get_cluster_info
from det_core._optional import demand
from det_core.errors import DetCoreError

from ._framework import Framework, Job, read_environment, run
from ._horovodrun import COMMAND
from ._machines._containers import become_ssh_server, ssh_port, wait_for_ssh_servers
from ._machines._place import is_here
from ._machines._places import find_place
from ._machines._ssh import Ssh, connect
from ._supervisor._notices import PREFIX
from ._words._options import CannotStart, UsageError
from ._words._parser import HelpWanted, Parser, count

__all__ = ["main"]

HELP = """\
usage: python -m det_core.launch.horovod [OPTIONS] script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] [OPTIONS OF HOROVODRUN] -- script.py [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.horovod [OPTIONS] --trial model_def:MyTrial [--config FILE ...]

Starts one process per GPU (else -np) with horovodrun, by gloo, and besides:
  every line of output starts with [rank=N], and no line is cut by another rank's;
  SIGTERM or Ctrl-C reaches each script once, and all have --grace seconds to save;
  when one rank fails the others have --grace seconds to end;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; and nothing of the job outlives the launcher.

examples:
  # as many processes as there are GPUs
  python -m det_core.launch.horovod train.py --lr 0.1

  # four processes, and an option of horovodrun
  python -m det_core.launch.horovod -np 4 --cycle-time-ms 3.5 -- train.py

  # two machines, of which this is the first; horovodrun reaches the other by ssh
  python -m det_core.launch.horovod --hosts node1:4,node2:4 train.py

options of this launcher:
  -np N                processes on all machines together (default: the slots of the trial, the tasks of Slurm, else
                       the GPUs)
  --nproc-per-node N   processes on each machine
  -H, --hosts A:N,B:N  machines and how many processes each gets; the first has to be this one
  --hostfile FILE      the same from a file with lines like `node1 slots=4`
  --autohorovod        with one process in all, run the script as it stands, without horovod
  --grace SECONDS      how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP;
                       what still runs then is killed (default: DET_CORE_GRACE, else 60)
  --tail LINES         how many of the last lines of the first failed rank are shown at the end (default: 20)
  --verbose            show the messages of horovodrun too (by default only if it fails itself)
  -m, --module         the script is the name of a module
  --no-python          the script is a command, whatever it looks like

The first word that is no option is the script; all after it is the script's, and so is a later --.
`horovodrun --help` shows the options of horovodrun.
"""
_OURS = ("-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile")


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    arguments = sys.argv[1:] if words is None else words
    try:
        if _is_not_first() and arguments[:1] not in (["-h"], ["--help"]):
            _serve()
    except (UsageError, CannotStart, DetCoreError) as e:
        print(f"{PREFIX}{e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    if "--autohorovod" in arguments:
        _become_a_single_script(arguments)
    return run(HOROVOD, arguments)


def command(job: Job) -> list[str]:
    """The command line of horovodrun for ``job``."""
    demand("horovod", extra="horovod", purpose="this launcher")
    _check(job)
    os.environ["USE_HOROVOD"] = "1"
    os.environ.pop("SLURM_JOBID", None)  # horovodrun would take it for a reason to run something else
    place, ssh = job.place, _ssh(job.theirs)
    if place.several:
        if _in_allocation(job):
            wait_for_ssh_servers([host.name for host in job.others()], ssh.port or ssh_port())
        connect([host.name for host in job.others()], job.socket_path, ssh)
    hosts = ",".join(f"{host.name if place.several else 'localhost'}:{host.slots}" for host in place.hosts)
    ours = ["-np", str(place.size), "-H", hosts, "--gloo", "--start-timeout", "1200", "--gloo-timeout-seconds", "240"]
    port = ["-p", str(ssh.port)] if ssh.port else []
    verbose = ["--verbose"] if job.asked.verbose else []
    return [sys.executable, "-c", COMMAND, *ours, *port, *_of_the_trial(), *verbose, *job.theirs, *job.wrapped]


def _check(job: Job) -> None:
    for option in job.theirs:
        if option in _OURS:
            raise UsageError(f"{option} has to stand before every option of horovodrun (see --help)")
    first = job.place.hosts[0].name
    if not is_here(first):
        raise UsageError(f"the first host is {first}, which is not this machine: horovodrun runs on the first one")
    if job.place.several and (first == "localhost" or first.startswith("127.")):
        raise UsageError(f"the first host is {first}, where the others do not reach it: give its name or address")
    if not _has_gloo():
        raise CannotStart(
            "horovod was built without gloo: install it again with HOROVOD_WITH_GLOO=1 pip install --no-cache-dir "
            "--force-reinstall --no-build-isolation --no-deps horovod"
        )


def _has_gloo() -> bool:
    """Whether a library of horovod has the class of its gloo controller; True also where that cannot be told."""
    spec = importlib.util.find_spec("horovod")
    folders = (spec.submodule_search_locations or []) if spec else []
    libraries = [library for folder in folders for library in Path(folder).glob("*/mpi_lib*.so")]
    return not libraries or any(_holds(library, b"14GlooController") for library in libraries)


def _holds(path: Path, text: bytes) -> bool:
    """Whether a file that is not empty holds ``text``; read no further than that."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content.find(text) >= 0


def _is_not_first() -> bool:
    """Whether this is a container whose ranks another one starts."""
    info = get_cluster_info()
    return info is not None and info.container_rank > 0


def _serve() -> None:
    info = get_cluster_info()
    assert info is not None
    become_ssh_server(info, read_environment())


def _in_allocation(job: Job) -> bool:
    info = get_cluster_info()
    return info is not None and [host.name for host in job.place.hosts] == info.container_addrs


def _ssh(theirs: list[str]) -> Ssh:
    """How horovodrun is going to reach other hosts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    info = get_cluster_info()
    cluster = ssh_port() if info is not None and len(info.container_addrs) > 1 else None
    parser.add_argument("-p", "--ssh-port", type=int, default=cluster)
    parser.add_argument("-i", "--ssh-identity-file")
    try:
        known, _ = parser.parse_known_args(theirs)
    except SystemExit:
        raise UsageError("-p, --ssh-port: expected a port") from None
    return Ssh(known.ssh_port, known.ssh_identity_file)


def _of_the_trial() -> list[str]:
    """What the experiment's config says about horovod."""
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


def _become_a_single_script(arguments: list[str]) -> None:
    """Run the script in place of this process if it is the only rank; else, and for any mistake, return."""
    try:
        environment = read_environment()
        parser = Parser(HOROVOD.name, HOROVOD.program)
        _add_options(parser)
        words = parser.split(arguments)
        place = find_place(words.asked, environment, HOROVOD.program, one_for_all=True)
    except (UsageError, HelpWanted):
        return  # the launcher comes to it in its turn
    if words.asked.autohorovod and place.size == 1:
        os.execvp(words.run[0], words.run)


def _add_options(parser: Parser) -> None:
    parser.add_argument("--autohorovod", action="store_true")
    parser.add_argument("-np", "--num-proc", dest="processes", type=count)
    parser.add_argument("-hostfile", dest="hostfile")


HOROVOD = Framework(
    name="horovod",
    program="horovodrun",
    help=HELP,
    rank_variables="HOROVOD_RANK,OMPI_COMM_WORLD_RANK,PMI_RANK",
    one_for_all=True,
    command=command,
    add_options=_add_options,
)


if __name__ == "__main__":
    raise SystemExit(main())
