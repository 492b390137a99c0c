"""``det-core completion``: a script for the shell that completes commands and run ids."""

from __future__ import annotations

import argparse

from det_core.cli._commands import COMMANDS

_BASH = """\
_det_core() {
  local current="${COMP_WORDS[COMP_CWORD]}" words=""
  case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]}" in
    1:*) words="@COMMANDS@" ;;
@SUBCOMMANDS@    *:runs:show|*:runs:export|*:runs:rm) words="$(det-core completion ids 2>/dev/null)" ;;
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
@SUBCOMMANDS@complete -c det-core -n '__fish_seen_subcommand_from show export rm' \\
    -a '(det-core completion ids 2>/dev/null)'
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
    parser.add_argument("shell", choices=[*_SHELLS, "ids"], metavar="{bash,fish,zsh}")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the script, or (for the script) what can stand for a run."""
    if args.shell == "ids":
        from det_core import client

        ids = [r.run_id for r in client.runs()]
        print("\n".join(ids + ["latest"] * bool(ids)))
        return 0
    script, sub = _SHELLS[args.shell]
    subcommands = "".join(
        sub.replace("@NAME@", name).replace("@WORDS@", " ".join(command.subcommands))
        for name, command in COMMANDS.items()
    )
    print(script.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@SUBCOMMANDS@", subcommands), end="")
    return 0
