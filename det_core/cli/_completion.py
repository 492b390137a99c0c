"""``det-core completion``: a script for the shell that completes commands, and ids of all kinds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from det_core.cli._commands import ALIASES, COMMANDS, EXPERIMENT_COMMANDS

if TYPE_CHECKING:
    from det_core.client import Master

_OF_EXPERIMENTS = (*EXPERIMENT_COMMANDS, "continue", "download-checkpoint", "delete")
_OF_TRIALS = ("describe", "kill", "logs", "metrics")
_BASH = """\
_det_core() {
  local current="${COMP_WORDS[COMP_CWORD]}" words=""
  case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]}" in
    1:*) words="@COMMANDS@" ;;
@SUBCOMMANDS@    *:runs:show|*:runs:export|*:runs:rm|*:sync:*) words="$(det-core completion ids 2>/dev/null)" ;;
    *:slurm:logs|*:slurm:cancel) words="$(det-core completion chains 2>/dev/null)" ;;
    *:checkpoint:describe|*:checkpoint:download|*:checkpoint:verify|*:checkpoint:rm)
      words="$(det-core completion checkpoints "$COMP_LINE" 2>/dev/null)" ;;
    @EXPERIMENTS@)
      words="$(det-core completion experiments "$COMP_LINE" 2>/dev/null)" ;;
    @TRIALS@)
      words="$(det-core completion trials "$COMP_LINE" 2>/dev/null)" ;;
  esac
  case "$current" in
    -*) words="$(det-core completion options "$COMP_LINE" 2>/dev/null)" ;;
  esac
  case "${COMP_WORDS[COMP_CWORD-1]}" in
    --run) words="$(det-core completion ids 2>/dev/null)" ;;
    --trial) words="$(det-core completion trials "$COMP_LINE" 2>/dev/null)" ;;
    --storage|--home|--output|-o|--master|--config|--checkpoint) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _det_core det-core
"""
_BASH_SUB = '    2:@NAME@:*) words="@WORDS@" ;;\n'
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
complete -c det-core -f
complete -c det-core -n '__fish_use_subcommand' -a '@COMMANDS@'
@SUBCOMMANDS@complete -c det-core -a '(det-core completion ids 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from runs; and __fish_seen_subcommand_from show export rm'
complete -c det-core -a '(det-core completion ids 2>/dev/null)' -n '__fish_seen_subcommand_from sync'
complete -c det-core -a '(det-core completion chains 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from slurm; and __fish_seen_subcommand_from logs cancel'
complete -c det-core -a '(det-core completion checkpoints (commandline -pc) 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from checkpoint; and __fish_seen_subcommand_from describe download verify rm'
complete -c det-core -n '__fish_seen_subcommand_from checkpoint' -l run -x -a '(det-core completion ids 2>/dev/null)'
complete -c det-core -a '(det-core completion experiments (commandline -pc) 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from experiment e; and __fish_seen_subcommand_from @EXPERIMENTS@'
complete -c det-core -a '(det-core completion experiments (commandline -pc) 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from trial t; and __fish_seen_subcommand_from list'
complete -c det-core -a '(det-core completion trials (commandline -pc) 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from trial t; and __fish_seen_subcommand_from @TRIALS@'
complete -c det-core -n '__fish_seen_subcommand_from experiment e; and __fish_seen_subcommand_from create' -F
"""
_FISH_SUB = (
    "complete -c det-core -n '__fish_seen_subcommand_from @NAME@; and not __fish_seen_subcommand_from @WORDS@' "
    "-a '@WORDS@'\n"
)
_SHELLS = {"bash": (_BASH, _BASH_SUB), "fish": (_FISH, _FISH_SUB), "zsh": (_ZSH, _BASH_SUB)}
_IDS = ("ids", "chains", "checkpoints", "experiments", "trials", "options")
_PATIENCE = 1.0
"""Seconds that a master may take to answer: somebody has pressed Tab."""
_NEWEST = 5
"""Experiments whose trials are offered."""
_EXAMPLES = """\
examples:
  eval "$(det-core completion bash)"                              in ~/.bashrc
  eval "$(det-core completion zsh)"                               in ~/.zshrc, after compinit
  det-core completion fish > ~/.config/fish/completions/det-core.fish"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", choices=[*_SHELLS, *_IDS], metavar="{bash,fish,zsh}")
    parser.add_argument("line", nargs="?", default="", help=argparse.SUPPRESS)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the script, or (for the script) what can stand for an id."""
    if args.shell in _IDS:
        find: Callable[[str], list[str]] = {
            "ids": lambda _line: _with_latest(_run_ids()),
            "chains": lambda _line: _with_latest(_chain_ids()),
            "checkpoints": lambda line: _with_latest(_checkpoint_ids(line)),
            "experiments": lambda line: _with_latest(_asked(line, _experiment_ids)),
            "trials": lambda line: _asked(line, _trial_ids),
            "options": _option_names,
        }[args.shell]
        print("\n".join(find(args.line)))
    else:
        print(_script(args.shell), end="")
    return 0


def _script(shell: str) -> str:
    script, sub = _SHELLS[shell]
    named = {name: command.subcommands for name, command in COMMANDS.items() if command.subcommands}
    named |= {short: named[name] for short, name in ALIASES.items()}
    for mark, groups in (("@EXPERIMENTS@", ("experiment", "e")), ("@TRIALS@", ("trial", "t"))):
        words = _OF_EXPERIMENTS if mark == "@EXPERIMENTS@" else _OF_TRIALS
        places = {word: "3" if word == "download-checkpoint" else "*" for word in words}  # behind that is a folder
        patterns = [f"{place}:{group}:{word}" for group in groups for word, place in places.items()]
        if mark == "@EXPERIMENTS@":
            patterns += ["*:trial:list", "*:t:list"]
        script = script.replace(mark, " ".join(words) if shell == "fish" else "|".join(patterns))
    subcommands = "".join(
        sub.replace("@NAME@", name).replace("@WORDS@", " ".join(words)) for name, words in named.items()
    )
    return script.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@SUBCOMMANDS@", subcommands)


def _with_latest(ids: list[str]) -> list[str]:
    return ids + ["latest"] * bool(ids)


def _option_names(line: str) -> list[str]:
    """The options of the command that an unfinished command line begins with."""
    import importlib

    words = line.split()[1:]
    command = COMMANDS.get(ALIASES.get(words[0], words[0])) if words else None
    if command is None:
        return ["--help", "--version", "--traceback"]
    parser = argparse.ArgumentParser()
    importlib.import_module(command.module).configure(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words[1:2]:
            parser = action.choices.get(words[1], parser)
    return sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--"))


def _asked(line: str, ask: Callable[[Master], list[str]]) -> list[str]:
    """What a master answers: the one that an unfinished command line leads to, if it runs."""
    from det_core.client._address import locate
    from det_core.client._master import Master

    given = _options(line, "--master", "--home")
    address = locate(given.master, home=given.home)
    if address is None:
        return []
    with Master(address, timeout=0, idle_timeout=_PATIENCE) as master:
        return ask(master)


def _experiment_ids(master: Master) -> list[str]:
    """Newest first."""
    return [str(e["id"]) for e in master.get("experiments", orderBy="ORDER_BY_DESC", limit=100)["experiments"]]


def _trial_ids(master: Master) -> list[str]:
    """Those of the newest experiments."""
    return [
        str(trial["id"])
        for experiment in _experiment_ids(master)[:_NEWEST]
        for trial in master.get(f"experiments/{experiment}/trials")["trials"]
    ]


def _run_ids() -> list[str]:
    from det_core import client

    return [run.run_id for run in client.runs()]


def _chain_ids() -> list[str]:
    """Return the IDs of the runs that were submitted to Slurm, newest first."""
    from det_core._env import Environment
    from det_core.slurm import list_chains

    return [chain.run_id for chain in list_chains(Environment.read().home)]


def _checkpoint_ids(line: str) -> list[str]:
    """Those that the options of an unfinished command line lead to, newest first."""
    from det_core import client

    given = _options(line, "--storage", "--run", "--home")
    with client.checkpoints(storage=given.storage, run=given.run, home=given.home) as found:
        return [checkpoint.storage_id for checkpoint in found][::-1]


def _options(line: str, *names: str) -> argparse.Namespace:
    """The options of an unfinished command line, those that there are."""
    import shlex

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for name in names:
        parser.add_argument(name)
    return parser.parse_known_args(shlex.split(line))[0]
