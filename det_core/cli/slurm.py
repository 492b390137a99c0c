"""``det-core slurm``: a script as a chain of Slurm jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import Group
from det_core.cli._options import COUNT, SCRIPT_SETTINGS, json_option, script_argument
from det_core.cli._output import note, print_json, print_rows, say
from det_core.cli.completion import complete_chains
from det_core.slurm._script import LAUNCHERS, MAX_JOBS, STOP_BEFORE

if TYPE_CHECKING:
    from det_core.slurm import JobOptions

_EXAMPLES = """\
examples:
  det-core slurm submit --time 4:00:00 -- python train.py --lr 0.1
  det-core slurm submit --nodes 2 --gpus-per-node 4 --time 4:00:00 -- python train.py
  det-core slurm submit --time 1-0 --sbatch exclusive --setup "module load cuda" -- python train.py

The script is one run, by the ID that is printed. It is asked to save before each time limit, and resumes in the next
job until it is done. DET_CORE_HOME is a directory that all nodes see."""
_SLURM_OPTIONS = {
    "partition": ["-p"],
    "account": ["-A"],
    "qos": ["-q"],
    "time": ["-t"],
    "gpus-per-node": [],
    "cpus-per-task": ["-c"],
    "mem": [],
    "constraint": ["-C"],
}
"""Options of sbatch by their long names, with its letters for them."""

chain_argument = click.argument("run", metavar="RUN", shell_complete=complete_chains)


@click.group("slurm", cls=Group)
def command() -> None:
    """Run a script as a chain of Slurm jobs.

    RUN is a run's ID, the beginning of one, a chain's name, a job's ID, or `latest`.
    """


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options of a chain, and its command."""
    options: list[Callable[..., Any]] = [
        *(
            click.option(*letters, f"--{name}", metavar="X", help="As sbatch takes it.")
            for name, letters in _SLURM_OPTIONS.items()
        ),
        click.option("-N", "--nodes", type=COUNT, default=1, metavar="N", help="Number of nodes (default: 1)."),
        click.option("--sbatch", metavar="KEY[=VALUE]", multiple=True, help="Any other option of sbatch."),
        click.option("-J", "--name", default="", help="Name of the jobs (default: the script's)."),
        click.option(
            "--setup",
            metavar="FILE|LINE",
            multiple=True,
            help="Shell lines before the script, such as `module load cuda`; on the first node, whose environment the "
            "others get.",
        ),
        click.option(
            "--env",
            metavar="NAME[=VALUE]",
            multiple=True,
            help="Variable to add to the environment of this command, which the jobs get.",
        ),
        click.option(
            "--launcher",
            type=click.Choice(LAUNCHERS),
            help="Launcher of one process a rank (default: torch_distributed where there are several GPUs or nodes).",
        ),
        click.option("--ranks-per-node", type=COUNT, default=0, metavar="N", help="Ranks, where there are no GPUs."),
        click.option(
            "--stop-before",
            type=float,
            metavar="SECONDS",
            help="Time before the time limit at which the script is asked to save "
            f"({STOP_BEFORE:g}, at most a third of the limit).",
        ),
        click.option(
            "--max-jobs", type=COUNT, default=MAX_JOBS, metavar="N", help=f"Maximum jobs (default: {MAX_JOBS})."
        ),
        click.option("--chain", type=COUNT, default=0, metavar="N", help="Submit N jobs now, if nodes may not submit."),
        script_argument,
    ]
    for option in reversed(options):  # the last decorator's option is the first of the help
        function = option(function)
    return function


def _read_options(options: dict[str, Any]) -> JobOptions:
    from det_core.slurm import JobOptions

    slurm = {name: value for name in _SLURM_OPTIONS if (value := options[name.replace("-", "_")])}
    for word in options["sbatch"]:
        name, _, value = word.lstrip("-").partition("=")  # people write --exclusive, too
        slurm[name] = value
    names = ("name", "nodes", "ranks_per_node", "stop_before", "max_jobs", "chain")
    job = JobOptions(
        list(options["script"]),
        slurm,
        setup=list(options["setup"]),
        launcher=options["launcher"] or "",
        **{name: options[name] for name in names},
    )
    job.check()
    return job


@command.command(epilog=_EXAMPLES, context_settings=SCRIPT_SETTINGS)
@click.option("--dry-run", is_flag=True, help="Print the batch file, and make nothing.")
@_job_options
def submit(dry_run: bool, **options: Any) -> None:
    """Submit a script as a chain of jobs that goes on until the run is done."""
    from det_core.slurm import submit

    job = _read_options(options)
    if dry_run:
        _print_batch_file(job)
        return
    chain = submit(_home(), job, list(options["env"]))
    say(f"submitted job {', '.join(chain.submitted)} ({chain.name})")
    say(f"run {chain.run_id} in {chain.run_path}")
    say(f"log {chain.log(chain.submitted[0])}")
    say(f"to watch it: det-core slurm logs -f {chain.run_id}")
    say(f"to end it: det-core slurm cancel {chain.run_id}")


@command.command(epilog=_EXAMPLES, context_settings=SCRIPT_SETTINGS)
@_job_options
def script(**options: Any) -> None:
    """Print the batch file of `submit`, to change and to submit yourself."""
    _print_batch_file(_read_options(options))


def _print_batch_file(job: JobOptions) -> None:
    from det_core.slurm import batch_file

    print(batch_file(job, os.getcwd()), end="")


def _home() -> Path:
    from det_core._env import Environment

    return Environment.read().home


@command.command("list")
@json_option
def list_chains(as_json: bool) -> None:
    """List chains of jobs, newest first."""
    from det_core.slurm import SlurmError, describe, list_chains, list_jobs

    chains = list_chains(_home())
    jobs = None  # where Slurm does not answer, the chains' own records say what they know
    try:
        jobs = list_jobs()
    except SlurmError as e:
        note(f"warning: {e}")
    views = [describe(chain, jobs) for chain in chains]
    if as_json:
        print_json(views)
        return
    head = ("RUN", "NAME", "STATE", "JOBS", "STEP", "CHECKPOINT", "TIME")
    print_rows(head, map(_row, views), empty=f"no chains in {_home()}")
    for view in views:
        if view["advice"]:
            note(view["advice"])


def _row(view: dict[str, Any]) -> list[object]:
    cells = {**view, "jobs": len(view["jobs"]), "seconds": timedelta(seconds=int(view["seconds"]))}
    shown = ("run_id", "name", "state", "jobs", "step", "checkpoint", "seconds")
    return [cells[name] for name in shown]


@command.command()
@chain_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the chain has ended.")
def logs(run: str, follow: bool) -> None:
    """Print the logs of all jobs of a chain."""
    from det_core.slurm import find_chain, stream_logs

    # As bytes: a progress bar, or what is not UTF-8, comes out as it went in.
    for block in stream_logs(find_chain(_home(), run), follow=follow):
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()


@command.command()
@chain_argument
@click.option("--now", is_flag=True, help="Do not ask the script to save.")
def cancel(run: str, now: bool) -> None:
    """End a chain: its script saves, and no job follows."""
    from det_core.slurm import cancel, find_chain

    chain = find_chain(_home(), run)
    if chain.end:
        note(f"run {chain.run_id} has ended already: {chain.end}")
        return
    running = cancel(chain, now=now)
    say(f"cancelled run {chain.run_id}")
    if running:
        say(f"job {', '.join(running)} ends; to watch it: det-core slurm logs -f {chain.run_id}")
