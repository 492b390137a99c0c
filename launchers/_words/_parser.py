"""The command line of a launcher: our options, options for the framework's own launcher, and what each rank runs."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from typing import NoReturn

from ._command import script_command
from ._options import Options, UsageError, add_options, read_options

TRIALS = ("torch_distributed", "horovod", "deepspeed")
"""The launchers under which trial classes run."""
_COUNT = re.compile(r"[1-9]\d{0,5}")


class HelpWanted(Exception):
    """``--help`` stands among the options."""


@dataclass(frozen=True)
class Words:
    """What a command line says."""

    asked: argparse.Namespace
    """Every option of the parser, as it was given; None where it was not."""
    options: Options
    theirs: list[str]
    """Options that are not ours, which stood before a ``--``: for the framework's launcher."""
    run: list[str]
    """The command that each rank runs."""
    typed: str
    """The whole command line, to be typed again."""


class Parser(argparse.ArgumentParser):
    """The options that all launchers have but torch_distributed, which takes torchrun's.

    A framework may add its own spellings of them: ``parser.add_argument("-H", dest="hosts")``, or ``dest="processes"``
    for how many ranks there are on all machines together.

    Args:
        name: the launcher's module.
        program: the framework's own launcher, as a person knows it ("horovodrun").
        grace: what ``DET_CORE_GRACE`` says.
    """

    def __init__(self, name: str, program: str, grace: float | None = None) -> None:
        super().__init__(prog=f"python -m det_core.launch.{name}", add_help=False, allow_abbrev=False)
        self._name, self._program = name, program
        self._words: list[str] = []
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("-m", "--module", action="store_true")
        self.add_argument("--no-python", "--no_python", action="store_true")
        self.add_argument("--trial")
        self.add_argument("--nproc-per-node", "--nproc_per_node", type=count)
        self.add_argument("--nnodes", type=count)
        self.add_argument("--node-rank", "--node_rank", type=number)
        self.add_argument("--master-addr", "--master_addr")
        self.add_argument("--master-port", "--master_port", type=port)
        self.add_argument("--hostfile")
        self.add_argument("--hosts")
        self.set_defaults(processes=None)
        add_options(self, grace)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`, with an option as it was typed."""
        if match := re.match(r"argument (\S+): ", message):
            spelled = (word for word in self._words if word.partition("=")[0] in match[1].split("/"))
            option = next(spelled, match[1])
            value = self._words[self._words.index(option) + 1 :][:1] if option in self._words else []
            message = f"{' '.join([option, *value])}: {message[match.end() :]}"
        raise UsageError(f"{message} (see --help)")

    def split(self, words: list[str]) -> Words:
        """Read ``words``.

        The first word that is no option is the script, and all words after it are the script's. Options that are not
        known here are for the framework's launcher, and need a ``--`` before the script, because only that launcher
        knows which of them have a value.

        Raises:
            UsageError: an option cannot be read, or there is no script.
            HelpWanted: there is ``--help`` before the script.
        """
        end, unknown = self._end_of_options(words)
        if unknown and "--" in words[end:]:
            end = words.index("--", end)
        elif unknown and not any(
            word.partition("=")[0] == "--trial" for word in words[:end]
        ):  # then it is the harness's
            raise UsageError(
                f"unknown option: {unknown} (see --help; an option of {self._program} needs a -- before the script)"
            )
        self._words = words[:end]
        asked, theirs = self.parse_known_args(words[:end])
        if asked.help:
            raise HelpWanted
        rest = words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]
        if asked.trial is not None:
            rest = ["--trial", asked.trial, *rest]
        if rest[:1] == ["--trial"] and self._name not in TRIALS:
            raise UsageError(f"--trial: trial classes run under {', '.join(TRIALS)}, not under {self._name}")
        if not rest:
            raise UsageError("no script to run (see --help)")
        run = script_command(rest[0], rest[1:], module=asked.module, no_python=asked.no_python)
        return Words(asked, read_options(asked), theirs, run, f"{self.prog} {shlex.join(words)}")

    def _end_of_options(self, words: list[str]) -> tuple[int, str]:
        """Where options that are known end, and the one there that is not known."""
        place = 0
        while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
            option, equals, _ = words[place].partition("=")
            action = self._option_string_actions.get(option)
            if action is None:
                return place, option
            place += 1 if equals or action.nargs == 0 else 2
        return min(place, len(words)), ""


def count(text: str) -> int:
    """A number above 0, as the type of an option."""
    if not _COUNT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a number, 1 or more, not {text!r}")
    return int(text)


def number(text: str) -> int:
    """A number from 0 on, as the type of an option."""
    if text != "0" and not _COUNT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, not {text!r}")
    return int(text)


def port(text: str) -> int:
    """A port, as the type of an option."""
    if not _COUNT.fullmatch(text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, not {text!r}")
    return int(text)
