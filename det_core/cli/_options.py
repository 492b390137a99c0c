"""Options and arguments that several commands share, and the master that a command line names."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import groups_with
from det_core.cli._output import INVALID, Failure, note_if_slow
from det_core.cli.completion import complete_experiments, complete_trials

if TYPE_CHECKING:
    from det_core.client import Experiment, Master, Trial
    from det_core.client._master import Address

LATEST = "latest"
SHOWN = 25
"""Rows of a table, if --limit does not say otherwise."""
ABOUT_MASTERS = """\
The master is the one at --master, else in DET_MASTER, else the embedded one of DET_CORE_HOME, which is started when it
is needed. One at another address needs its user's token: set DET_USER_TOKEN."""


class Id(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions alone
    """The number of an experiment or a trial."""

    name = "id"

    def __init__(self, what: str, shown_by: str, words: Sequence[str] = ()) -> None:
        self._what = what
        self._shown_by = shown_by
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Read the number, or one of the words that stand for one."""
        if isinstance(value, int) or value in self._words:
            return value  # type: ignore[no-any-return]
        # A larger one cannot be an ID, and databases refuse to look for it.
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 2**31):
            self.fail(f"{value!r} is not the number of {self._what}; `{self._shown_by}` shows them", param, ctx)
        return int(value)


COUNT = click.IntRange(min=0)
EXPERIMENT = Id("an experiment", "det-core experiment list", [LATEST])
TRIAL = Id("a trial", "det-core trial list EXPERIMENT")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
limit_option = click.option(
    "--limit",
    type=COUNT,
    metavar="N",
    help=f"Show the newest N (default: {SHOWN} in a table, all in JSON; 0: all).",
)
home_option = click.option(
    "--home",
    metavar="DIR",
    help="Directory that keeps everything (default: DET_CORE_HOME, else the user data directory).",
)
master_option = click.option(
    "--master", metavar="URL", help="Address of the master (default: DET_MASTER, else the one of --home)."
)
config_option = click.option(
    "--config", metavar="KEY=VALUE", multiple=True, help="Change a value, such as searcher.max_trials=8."
)
tail_option = click.option("--tail", "-n", type=click.IntRange(1, 2**31 - 1), metavar="N", help="The last N lines.")
follow_option = click.option("--follow", "-f", is_flag=True, help="Go on with new lines until the end.")
experiment_argument = click.argument(
    "experiment", metavar="EXPERIMENT", type=EXPERIMENT, shell_complete=complete_experiments
)
experiments_argument = click.argument(
    "experiments",
    metavar="EXPERIMENT...",
    type=EXPERIMENT,
    nargs=-1,
    required=True,
    shell_complete=complete_experiments,
)
trial_argument = click.argument("trial", metavar="TRIAL", type=TRIAL, shell_complete=complete_trials)
config_file_argument = click.argument("config_file", metavar="CONFIG", type=click.Path(exists=True, dir_okay=False))
SCRIPT_SETTINGS = {"allow_interspersed_args": False}
"""Settings of a command that takes a script's command: options after its first word are the script's."""


def _check_script(ctx: click.Context, _param: click.Parameter, script: Sequence[str]) -> Sequence[str]:
    """Refuse a command that cannot be meant, before anything is started for it."""
    if ctx.resilient_parsing:
        return script
    if not script:
        raise Failure(f"no command to run: {ctx.command_path} -- python train.py", INVALID)
    first = script[0]
    if shutil.which(first) is not None:
        return script
    # `run list` and `runs list` differ in a letter.
    if ctx.info_name == "run" and "runs" in groups_with(ctx, first):
        raise Failure(f"no command {first!r}: did you mean `det-core runs {first}`?", INVALID)
    if first.endswith(".py"):
        hint = f"{ctx.command_path} -- python {first}"
        raise Failure(f"{first} is not a command, but a script; to run it: {hint}", INVALID)
    return script


script_argument = click.argument(
    "script", metavar="[--] COMMAND...", nargs=-1, type=click.Path(), callback=_check_script
)


def limit_of(limit: int | None, as_json: bool) -> int | None:
    """Return how many rows to show; None: all."""
    if limit is None:
        return None if as_json else SHOWN  # a program reads all, a person a screen
    return limit or None


def on_master(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --master and --home, and call the command with a session with the master that they name."""

    @functools.wraps(function)
    def run(master: str | None, home: str | None, **options: Any) -> Any:
        from det_core.client._master import Master

        with Master(reach_master(master, home)) as session:
            return function(session, **options)

    return master_option(home_option(run))


def reach_master(master: str | None, home: str | None) -> Address:
    """Return the address of the master that --master and --home name; start the embedded one if it is needed."""
    from dataclasses import replace

    from det_core.client._master import reach

    with note_if_slow("reaching the master …"):
        address = reach(master, home=home)
    if master:
        return replace(address, source="--master")  # for errors
    return address


def find_experiment(master: Master, name: int | str) -> Experiment:
    """Return the experiment that an argument names."""
    from det_core.client._experiments import Experiment, experiment
    from det_core.errors import UnknownToMaster

    if name != LATEST:
        return experiment(int(name), master)
    newest = master.get("experiments", sortBy="SORT_BY_START_TIME", orderBy="ORDER_BY_DESC", limit=1)["experiments"]
    if not newest:
        raise UnknownToMaster(f"the master at {master.url} has no experiments yet", 404)
    return Experiment(master, newest[0])


def find_trial(master: Master, number: int) -> Trial:
    """Return the trial of this number."""
    from det_core.client._experiments import Trial

    # Without a summary, for which the master reads all its metrics.
    return Trial(master, master.get(f"trials/{number}", summary=False)["trial"])


def command_for(*words: object) -> str:
    """Return a command to type, about the master of the command that runs now."""
    import shlex

    command = ["det-core", *map(str, words)]
    context = click.get_current_context(silent=True)
    if context is not None:
        # One of them is enough: --master says all, --home which master where there is no --master.
        named = [["--" + name, context.params[name]] for name in ("master", "home") if context.params.get(name)]
        for option in named[:1]:
            command += option
    return shlex.join(command)
