"""Finding the command and running it; its exit status is what ``_status.py`` says."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from det_core._notices import open_standard_streams, write_quietly
from det_core.cli._commands import ALIASES, COMMANDS
from det_core.cli._say import error, warnings_as_notes

_DESCRIPTION = """\
Run training scripts and hyperparameter searches; look at what they have reported and kept.

The same script runs in three ways:
  python train.py                                     bare: what it reports is kept in a folder (`runs`, `checkpoint`)
  det-core run -- python train.py                     as a trial of a master on this machine, started when needed
  det-core experiment create search.yaml . --follow   as many trials as a search wants
With DET_MASTER or --master, a master elsewhere does the same."""
_EXAMPLES = """\
examples:
  det-core experiment create search.yaml . --follow   run the search that a file describes, and watch it
  det-core search preview search.yaml                 its rungs, brackets and budget, before anything runs
  det-core experiment list                            what this master has run, newest first
  det-core e logs latest -f                           come back to the newest one (`e` is short for experiment)
  det-core e pause 3; det-core e activate 3           its trials save and stop; and go on
  det-core e download-checkpoint 3 model              the best model of experiment 3, into the folder model
  det-core t metrics 12 --group validation            what trial 12 has reported
  det-core master up --slots 4                        let four trials run at a time on this machine
  det-core runs list                                  what has run here without a master, newest first
  det-core runs export latest --format csv > out.csv  all metrics of a run as a table
  det-core checkpoint download latest model           the newest checkpoint of the newest run
  eval "$(det-core completion bash)"                  completes commands and ids in this shell

`det-core COMMAND --help` says more. All is kept in DET_CORE_HOME, else in the platform's user data folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        0 if it was done, 1 if it failed, 130 if it was interrupted, and what :mod:`det_core.cli._status` says. A
        command line that is not understood exits with 2, and ``--help`` and ``--version`` with 0, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    trace = arguments[:1] == ["--traceback"]
    if trace:
        del arguments[0]
    open_standard_streams()
    if sys.stdout is None:  # closed, as some daemons start a command
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays for as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may not be UTF-8, and a terminal may show less than that
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        return 0
    except KeyboardInterrupt:
        error("interrupted")
        return 130
    except Exception as e:
        if trace:
            raise
        error(_told(e))
        return 1
    finally:  # argparse has printed a text and exits, or a stream takes no more
        for stream in (sys.stdout, sys.stderr):
            write_quietly("", stream)


def _dispatch(arguments: list[str]) -> int:
    name = ALIASES.get(arguments[0], arguments[0]) if arguments else ""
    command = COMMANDS.get(name)
    if command is None:
        parser = _parser()
        if not arguments:
            parser.print_help()
            return 0
        if meant := _meant(*arguments):
            parser.error(f"there is no command {name!r}: did you mean {' or '.join(f'`{m}`' for m in meant)}?")
        parser.parse_args(arguments)  # --help, --version, or an error that lists the commands
        return 0
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"det-core {name}", description=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.configure(parser)
    if command.subcommands and name != "completion":
        if not arguments[1:]:
            parser.print_help()
            return 0
        _know(parser, command.subcommands, arguments[1])
    args = parser.parse_args(arguments[1:])
    with warnings_as_notes():
        return int(args.run_command(args))


def _know(parser: argparse.ArgumentParser, names: Sequence[str], given: str) -> None:
    """Exit with status 2 if ``given`` is none of a group's commands, with the one that was probably meant."""
    if given in names or given.startswith("-"):
        return
    from difflib import get_close_matches

    meant = get_close_matches(given, names, n=1)
    hint = f"did you mean `{parser.prog} {meant[0]}`?" if meant else f"there are {', '.join(names)}"
    parser.error(f"there is no command {given!r}: {hint}")


def _parser() -> argparse.ArgumentParser:
    import det_core

    parser = argparse.ArgumentParser(
        prog="det-core",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"det-core {det_core.__version__}")
    parser.add_argument("--traceback", action="store_true", help="before a command: show where an error came from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser


def _meant(name: str, *more: str) -> list[str]:
    """The commands that somebody who types ``det-core <name> <more>`` may mean."""
    if name.startswith("-"):
        return []
    within = [f"det-core {group} {name}" for group in COMMANDS if name in COMMANDS[group].subcommands]
    if within:
        return within
    from difflib import get_close_matches

    return [" ".join(["det-core", match, *more]) for match in get_close_matches(name, COMMANDS, n=1)]


def _told(e: Exception) -> str:
    """An error as one line."""
    from det_core.errors import DetCoreError, StorageError

    plain = e.args[-1] if isinstance(e, StorageError) else e  # without "[Errno 13]"
    text = " ".join(str(plain).split())
    if isinstance(e, (DetCoreError, ValueError, OSError)) and text:
        return text
    return f"unexpected {type(e).__name__}: {text} (det-core --traceback … shows where)"
