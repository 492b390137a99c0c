"""``det-core completion``: a script for the shell that completes commands, run ids and checkpoint ids."""

from __future__ import annotations

import argparse

from det_core.cli._commands import COMMANDS

_BASH = """\
_det_core() {
  local current="${COMP_WORDS[COMP_CWORD]}" words=""
  case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]}" in
    1:*) words="@COMMANDS@" ;;
@SUBCOMMANDS@    *:runs:show|*:runs:export|*:runs:rm) words="$(det-core completion ids 2>/dev/null)" ;;
    *:checkpoint:describe|*:checkpoint:download|*:checkpoint:verify|*:checkpoint:rm)
      words="$(det-core completion checkpoints "$COMP_LINE" 2>/dev/null)" ;;
  esac
  case "${COMP_WORDS[COMP_CWORD-1]}" in
    --run) words="$(det-core completion ids 2>/dev/null)" ;;
    --storage|--home|--output|-o) words="" ;;
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
complete -c det-core -a '(det-core completion checkpoints (commandline -pc) 2>/dev/null)' \\
    -n '__fish_seen_subcommand_from checkpoint; and __fish_seen_subcommand_from describe download verify rm'
complete -c det-core -n '__fish_seen_subcommand_from checkpoint' -l run -x -a '(det-core completion ids 2>/dev/null)'
"""
_FISH_SUB = (
    "complete -c det-core -n '__fish_seen_subcommand_from @NAME@; and not __fish_seen_subcommand_from @WORDS@' "
    "-a '@WORDS@'\n"
)
_SHELLS = {"bash": (_BASH, _BASH_SUB), "fish": (_FISH, _FISH_SUB), "zsh": (_ZSH, _BASH_SUB)}
_EXAMPLES = """\
examples:
  eval "$(det-core completion bash)"                              in ~/.bashrc
  eval "$(det-core completion zsh)"                               in ~/.zshrc, after compinit
  det-core completion fish > ~/.config/fish/completions/det-core.fish"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", choices=[*_SHELLS, "ids", "checkpoints"], metavar="{bash,fish,zsh}")
    parser.add_argument("line", nargs="?", default="", help=argparse.SUPPRESS)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the script, or (for the script) what can stand for a run or a checkpoint."""
    if args.shell in ("ids", "checkpoints"):
        ids = _run_ids() if args.shell == "ids" else _checkpoint_ids(args.line)
        print("\n".join(ids + ["latest"] * bool(ids)))
        return 0
    script, sub = _SHELLS[args.shell]
    subcommands = "".join(
        sub.replace("@NAME@", name).replace("@WORDS@", " ".join(command.subcommands))
        for name, command in COMMANDS.items()
    )
    print(script.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@SUBCOMMANDS@", subcommands), end="")
    return 0


def _run_ids() -> list[str]:
    from det_core import client

    return [run.run_id for run in client.runs()]


def _checkpoint_ids(line: str) -> list[str]:
    """Those that the options of an unfinished command line lead to, newest first."""
    import shlex

    from det_core import client

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for option in ("--storage", "--run", "--home"):
        parser.add_argument(option)
    given, _ = parser.parse_known_args(shlex.split(line))
    with client.checkpoints(storage=given.storage, run=given.run, home=given.home) as found:
        return [checkpoint.storage_id for checkpoint in found][::-1]
