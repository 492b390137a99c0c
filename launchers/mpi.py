"""``python -m det_core.launch.mpi``: one process per slot, under ``mpirun``."""

from __future__ import annotations

import os
import shutil
import sys

from . import _framework
from ._framework import Framework, Job
from ._machines._hosts import Host, write_hostfile
from ._machines._ssh import Ssh, connect, secrets_of
from ._member import is_member, run_member
from ._words._options import CannotStart, UsageError
from ._words._parser import Parser, count

__all__ = ["main"]

HELP = """\
usage: python -m det_core.launch.mpi [OPTIONS] [--] script.py [ARGS...]
       python -m det_core.launch.mpi [OPTIONS] [--] python script.py [ARGS...]
       python -m det_core.launch.mpi [OPTIONS] -m package.module [ARGS...]
       python -m det_core.launch.mpi [OPTIONS] [OPTIONS OF mpirun] -- script.py [ARGS...]

Starts one process per slot with Open MPI's mpirun, on this machine or over ssh on others too, and besides:
  every line of output starts with [rank=N], and no line is cut by another rank's;
  SIGTERM or Ctrl-C reaches each script once, and all have --grace seconds to save;
  when one rank fails the others have --grace seconds to end;
  the exit status is 0 if every rank ended with 0, else that of the first rank that failed,
  whose last lines are shown again at the end; and nothing of the job outlives the launcher.
A script finds its place with core.DistributedContext.from_mpi().

examples:
  # four processes on this machine
  python -m det_core.launch.mpi -np 4 train.py --lr 0.1

  # two on each of two machines, started from here over ssh (once, on one machine)
  python -m det_core.launch.mpi --hosts node1:2,node2:2 train.py

  # the same with a hostfile, and with an option of mpirun: a -- stands before the script then
  python -m det_core.launch.mpi --hostfile hosts.txt --mca btl_tcp_if_include eth0 -- train.py

where it runs, unless options say so:
  in an allocation of a master, its containers and slots; in a job of Slurm, its nodes and tasks (run the launcher in
  the batch script, without srun); else this machine. Where mpirun or srun --mpi has started this launcher itself, once
  for each rank, it starts nothing but that rank's script: mpirun -np 4 python -m det_core.launch.mpi train.py

options of this launcher:
  -np N, -n N            processes on all machines together (default: one per slot or GPU)
  --nproc-per-node N     processes on each machine
  --hostfile FILE        the machines, as lines of `NAME slots=N`
  --hosts NAME:N,NAME:N  the same on the command line (also -H, --host)
  --master-addr HOST     the address by which the other machines reach the first one (default: its name)
  -m, --module           run a module, as python -m does
  --no-python            run the script as a command, whatever it is
  --grace SECONDS        how long scripts may take to save and exit after SIGTERM, Ctrl-C or SIGHUP, or when
                         another rank has failed; what still runs then is killed (default: DET_CORE_GRACE, else 60)
  --tail LINES           how many of the last lines of the first failed rank are shown at the end (default: 20)
  --verbose              show the messages of mpirun too (by default only if it fails itself)

The first word that is no option is the script; all after it is the script's, and so is a later --.
"""
_HANDED_ON = ("DET_", "PYTHON", "OMP_", "GLOO_", "NCCL_", "USE_")
"""How the variables begin that ranks on other machines get as well."""
_NEVER = ("DET_SLOT_IDS", "DET_AGENT_ID", "DET_CONTAINER_ID", "PYTHONHOME")


def add_options(parser: Parser) -> None:
    """The spellings of mpirun."""
    parser.add_argument("-np", "-n", "-c", "--np", "--n", dest="processes", type=count)
    parser.add_argument("-H", "--host", "-host", dest="hosts")
    parser.add_argument("-hostfile", "--machinefile", "-machinefile", dest="hostfile")


def command(job: Job) -> list[str]:
    """Its command line."""
    if shutil.which("mpirun") is None:
        raise CannotStart(
            "this launcher needs mpirun, which is not on PATH. Install it: apt-get install openmpi-bin openssh-client"
        )
    place = job.place
    _hand_over(job)
    hosts = place.hosts if place.several else [Host("localhost", place.size)]
    grace = str(round(job.grace) + 5)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        *("mpirun", *root, "-np", str(place.size)),
        *("--hostfile", write_hostfile(f"{job.folder}/hosts", hosts)),
        *("--oversubscribe", "--bind-to", "none", "--map-by", "slot", "--stdin", "none"),
        *("--mca", "odls_base_sigkill_timeout", grace),
        *("--mca", "orte_abort_on_non_zero_status", "1" if job.alone else "0"),  # else the launcher sees to it
        *("--mca", "orte_local_tmpdir_base", job.folder),
        *(_handed_on(job) if place.several else ("--mca", "plm", "isolated")),
        *job.theirs,
        *job.wrapped,
    ]


def _hand_over(job: Job) -> None:
    """Check that ssh reaches the other machines, and give them what mpirun would send in clear text."""
    first = job.place.hosts[0].name
    if job.place.several and (first == "localhost" or first.startswith("127.")):
        raise UsageError(f"the first host is {first}, where the others do not reach it: give its name or address")
    others = job.others()
    ways = [Ssh(), Srun()] if _by_slurm(job) else [Ssh()]
    for way in ways:
        try:
            return connect([host.name for host in others], job.socket_path, way)
        except CannotStart:
            if not _by_slurm(job):
                raise
    job.alone.extend(others)


class Srun(Ssh):
    """Hosts that are reached as steps of this job of Slurm."""

    def command(self, host: str, words: str) -> list[str]:
        """The command line that runs ``words`` in a shell of ``host``."""
        one = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0"]
        return ["srun", "--overlap", "--quiet", "--unbuffered", *one, f"--nodelist={host}", "sh", "-c", words]


def _by_slurm(job: Job) -> bool:
    """Whether mpirun starts the ranks of other machines by ``srun``, which hands all variables on."""
    return "SLURM_JOB_ID" in job.environment.launch


def _handed_on(job: Job) -> list[str]:
    if _by_slurm(job):
        return []
    never = {*_NEVER, *secrets_of(os.environ)}
    names = sorted(name for name in os.environ if name.startswith(_HANDED_ON) and name not in never)
    return [word for name in names for word in ("-x", name)]


FRAMEWORK = Framework(
    name="mpi",
    program="mpirun",
    help=HELP,
    rank_variables="OMPI_COMM_WORLD_RANK,PMI_RANK",
    one_for_all=True,
    command=command,
    add_options=add_options,
)


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    if is_member(FRAMEWORK, sys.argv[1:] if words is None else words):
        return run_member(FRAMEWORK, words)
    return _framework.run(FRAMEWORK, words)


if __name__ == "__main__":
    raise SystemExit(main())
