"""``det-core slurm``: a script as a chain of Slurm jobs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from det_core.cli._say import count, note, print_json, print_table

if TYPE_CHECKING:
    from det_core.slurm import JobOptions

_SUBMIT_EXAMPLES = """\
examples:
  det-core slurm submit --time 4:00:00 -- python train.py --lr 0.1
  det-core slurm submit --nodes 2 --gpus-per-node 4 --time 4:00:00 -- python train.py
  det-core slurm submit --time 1-0 --sbatch exclusive --setup "module load cuda" -- python train.py

The script is one run, by the id that is printed. It is asked to save before each time limit, and goes on in the next
job until it is done. DET_CORE_HOME is a folder that all nodes see."""
_SLURM_OPTIONS = ("partition", "account", "qos", "time", "gpus-per-node", "cpus-per-task", "mem", "constraint")
_RUN = "a run's id, the beginning of one, a chain's name, a job's id, or `latest`"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the commands."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    submit = _command(commands, "submit", "submit a script as a chain of jobs that goes on until the run is done")
    submit.add_argument("--dry-run", action="store_true", help="print the batch file, and make nothing")
    submit.set_defaults(run_command=_submit)
    script = _command(commands, "script", "print the batch file of `submit`, to change and to submit yourself")
    script.set_defaults(run_command=_print_script)
    for parser_of_options in (submit, script):
        _options(parser_of_options)
    listing = _command(commands, "list", "chains of jobs, newest first")
    listing.add_argument("--json", action="store_true", help="a list of objects")
    listing.set_defaults(run_command=_list)
    logs = _command(commands, "logs", "the logs of all jobs of a chain")
    logs.add_argument("RUN", help=_RUN)
    logs.add_argument("--follow", "-f", action="store_true", help="go on until the chain has ended")
    logs.set_defaults(run_command=_logs)
    cancel = _command(commands, "cancel", "end a chain: its script saves, and no job follows")
    cancel.add_argument("RUN", help=_RUN)
    cancel.add_argument("--now", action="store_true", help="do not ask the script to save")
    cancel.set_defaults(run_command=_cancel)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def _options(parser: argparse.ArgumentParser) -> None:
    from det_core.slurm._script import LAUNCHERS, MAX_JOBS, STOP_BEFORE

    parser.epilog = _SUBMIT_EXAMPLES
    parser.usage = f"{parser.prog} [options] -- COMMAND …"
    for name in _SLURM_OPTIONS:
        parser.add_argument(f"--{name}", metavar="X", help="as sbatch takes it")
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument(
        "--sbatch", metavar="KEY[=VALUE]", action="append", default=[], help="any other option of sbatch"
    )
    parser.add_argument("--name", default="", help="name of the jobs (default: the script's)")
    parser.add_argument("--setup", metavar="FILE|LINE", action="append", default=[],
                        help="shell lines before the script, such as `module load cuda`; on the first node, whose "
                        "environment the others get")  # fmt: skip
    parser.add_argument("--env", metavar="NAME[=VALUE]", action="append", default=[],
                        help="variable to add to the environment of this command, which the jobs get")  # fmt: skip
    parser.add_argument("--launcher", choices=LAUNCHERS, default="", help="starts one process a rank (default: "
                        "torch_distributed where there are several GPUs or nodes, else none)")  # fmt: skip
    parser.add_argument("--ranks-per-node", type=count, default=0, metavar="N", help="where there are no GPUs")
    parser.add_argument("--stop-before", type=float, metavar="SECONDS", help="how long before the time limit the "
                        f"script is asked to save ({STOP_BEFORE:g}, at most a third of it)")  # fmt: skip
    parser.add_argument("--max-jobs", type=count, default=MAX_JOBS, metavar="N", help=f"default: {MAX_JOBS}")
    parser.add_argument("--chain", type=count, default=0, metavar="N",
                        help="submit N jobs at once, where compute nodes may not submit")  # fmt: skip
    parser.add_argument("COMMAND", nargs=argparse.REMAINDER, help="the command, and its arguments")


def _read_options(args: argparse.Namespace) -> JobOptions:
    from det_core.slurm import JobOptions

    command = args.COMMAND[1:] if args.COMMAND[:1] == ["--"] else args.COMMAND
    if not command:
        raise ValueError("there is no command to run: det-core slurm submit --time 4:00:00 -- python train.py")
    slurm = {name: value for name in _SLURM_OPTIONS if (value := getattr(args, name.replace("-", "_")))}
    for word in args.sbatch:
        name, _, value = word.lstrip("-").partition("=")
        slurm[name] = value
    options = JobOptions(
        command, slurm, args.name, args.nodes, args.setup, args.launcher, args.ranks_per_node, args.stop_before,
        args.max_jobs, args.chain,
    )  # fmt: skip
    options.check()
    return options


def _print_script(args: argparse.Namespace) -> int:
    from det_core.slurm import batch_file

    print(batch_file(_read_options(args), os.getcwd()), end="")
    return 0


def _home() -> Path:
    from det_core._env import Environment

    return Environment.read().home


def _submit(args: argparse.Namespace) -> int:
    from det_core.slurm import submit

    if args.dry_run:
        return _print_script(args)
    chain = submit(_home(), _read_options(args), args.env)
    first, *others = chain.submitted
    more = f" and {len(others)} more" if others else ""
    print(f"submitted job {first}{more} ({chain.name})")
    print(f"run {chain.run_id} in {chain.run_path}")
    print(f"log {chain.log(chain.submitted[0])}")
    print(f"to watch it: det-core slurm logs -f {chain.run_id}")
    print(f"to end it: det-core slurm cancel {chain.run_id}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from det_core.slurm import SlurmError, describe, list_chains, list_jobs

    chains = list_chains(_home())
    listed = None
    try:
        listed = list_jobs()
    except SlurmError as e:
        note(f"warning: {e}")
    views = [describe(chain, listed) for chain in chains]
    if args.json:
        print_json(views)
        return 0
    if not views:
        note(f"no chains in {_home()}")
        return 0
    rows = []
    for view in views:
        view.update(jobs=len(view["jobs"]), seconds=_duration(view["seconds"]))
        shown = ("run_id", "name", "state", "jobs", "step", "checkpoint", "seconds")
        rows.append(["-" if view[name] is None else str(view[name]) for name in shown])
    print_table(("RUN", "NAME", "STATE", "JOBS", "STEP", "CHECKPOINT", "TIME"), rows)
    for view in views:
        if view["advice"]:
            note(view["advice"])
    return 0


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def _logs(args: argparse.Namespace) -> int:
    from det_core.slurm import find_chain, stream_logs

    chain = find_chain(_home(), args.RUN)
    for block in stream_logs(chain, follow=args.follow):
        sys.stdout.buffer.write(block)
        sys.stdout.buffer.flush()
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from det_core.slurm import cancel, find_chain

    chain = find_chain(_home(), args.RUN)
    if chain.end:
        note(f"run {chain.run_id} has ended already: {chain.end}")
        return 0
    running = cancel(chain, now=args.now)
    print(f"cancelled run {chain.run_id}")
    if running:
        once = "" if args.now else " once the script has saved"
        print(f"job {', '.join(running)} ends{once}; to watch it: det-core slurm logs -f {chain.run_id}")
    return 0
