"""Texts for shells and coding agents: ``det-core completion``, what a shell offers for an ID; ``det-core skill``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from det_core.cli._groups import Command
from det_core.cli._output import note, print_json

if TYPE_CHECKING:
    from det_core.client import Master

_VARIABLE = "_DET_CORE_COMPLETE"
_TIMEOUT = 1.0
"""Seconds that a master may take to answer while somebody waits at the keyboard."""
_EXPERIMENTS_WITH_TRIALS = 5
"""Number of the newest experiments whose trials are offered."""
_EXAMPLES = """\
examples:
  eval "$(det-core completion bash)"                              in ~/.bashrc
  eval "$(det-core completion zsh)"                               in ~/.zshrc, after compinit
  det-core completion fish > ~/.config/fish/completions/det-core.fish"""

_SKILL_EXAMPLES = """\
examples:
  det-core skill                                          the paths, a line each
  cp -r "$(det-core skill --folder)" .agents/skills/      give the skill to an agent that reads this directory

The skill card says on one page how to port a training script, in the open format for agent skills; llms.txt is an index
of the documentation."""

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion", cls=Command, epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands and IDs in a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    # Not through say(): the script has line ends, which that would escape.
    print(kind(ctx.find_root().command, {}, "det-core", _VARIABLE).source(), end="")


@click.command("skill", cls=Command, epilog=_SKILL_EXAMPLES)
@click.option("--folder", "folder_only", is_flag=True, help="Print the skill's directory alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def skill(folder_only: bool, as_json: bool) -> None:
    """Print the paths of the texts for coding agents: a skill card, llms.txt."""
    import det_core

    package = Path(det_core.__file__).parent
    folder = (package / "skills" / "port-a-training-script").resolve()
    card = folder / "SKILL.md"
    index = (package / "llms.txt").resolve()
    if folder_only:
        print(folder)
    elif as_json:
        print_json({"skill": str(card), "llms": str(index)})
    else:
        print(card, index, sep="\n")
        note("to have a coding agent port a script, give it the first file")


def complete(app: click.Command, request: str) -> int:
    """Answer the script of a shell, which asks what can stand at the cursor."""
    return shell_complete(app, {}, "det-core", _VARIABLE, request)


@add_completion_class
class _Bash(BashComplete):
    """Completion in bash, which breaks words at = and at : and passes these as words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        # "--master=http://gpu:8080" arrives in pieces.
        for word in [*args, incomplete]:
            if words and (word in ("=", ":") or words[-1].endswith(("=", ":"))):
                words[-1] += word
            else:
                words.append(word)
        return words[:-1], words[-1]


def _offer(find: Callable[[dict[str, Any]], Iterable[str]], latest: bool = True) -> Complete:
    """Return a completion by the IDs that ``find`` returns for the options of the unfinished command line."""

    def offer(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from det_core.errors import DetCoreError

        try:
            ids = list(find(ctx.params))
        except (DetCoreError, OSError, ValueError):  # nothing to offer, and nobody to read an error
            return []
        if latest and ids:
            ids.append("latest")
        return [CompletionItem(name) for name in ids if name.startswith(incomplete)]

    return offer


def _runs(options: dict[str, Any]) -> list[str]:
    from det_core import client

    return [run.run_id for run in client.runs(options.get("home"))]


def _chains(_options: dict[str, Any]) -> list[str]:
    from det_core._env import Environment
    from det_core.slurm import list_chains

    return [chain.run_id for chain in list_chains(Environment.read().home)]


def _checkpoints(options: dict[str, Any]) -> list[str]:
    from det_core import client

    names = {name: options.get(name) for name in ("storage", "run", "home")}
    with client.checkpoints(**names) as found:
        return [checkpoint.storage_id for checkpoint in found][::-1]


def _ask(ask: Callable[[Master], list[str]], options: dict[str, Any]) -> list[str]:
    """Return the answer of the master that the options name, if it runs; none is started."""
    from det_core.client._master import Master, locate

    address = locate(options.get("master"), home=options.get("home"))
    if address is None:
        return []
    # Sent once: a shell that hangs is worse than one that offers nothing.
    with Master(address, timeout=0, idle_timeout=_TIMEOUT) as master:
        return ask(master)


def _experiments_of(master: Master) -> list[str]:
    return [str(e["id"]) for e in master.get("experiments", orderBy="ORDER_BY_DESC", limit=100)["experiments"]]


def _trials_of(master: Master) -> list[str]:
    return [
        str(trial["id"])
        for experiment in _experiments_of(master)[:_EXPERIMENTS_WITH_TRIALS]
        for trial in master.get(f"experiments/{experiment}/trials")["trials"]
    ]


complete_runs = _offer(_runs)
complete_chains = _offer(_chains)
complete_checkpoints = _offer(_checkpoints)
complete_experiments = _offer(partial(_ask, _experiments_of))
complete_trials = _offer(partial(_ask, _trials_of), latest=False)
