"""The command ``det-core``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

from det_core._notices import open_standard_streams, write_quietly
from det_core.cli._groups import RootGroup
from det_core.cli._output import DONE, FAILED, INTERRUPTED, error, warnings_as_notes

__all__ = ["main"]

_DESCRIPTION = """\
Run training scripts and hyperparameter searches; look at what they have reported and kept.

\b
The same script runs in three ways:
  python train.py                                     bare: reports are kept in a directory (`runs`, `checkpoint`)
  det-core run -- python train.py                     as a trial of a master on this machine, started when needed
  det-core experiment create search.yaml . --follow   as many trials as a search needs

With DET_MASTER or --master, a master elsewhere does the same."""
_EXAMPLES = """\
examples:
  det-core experiment create search.yaml . --follow   run the search that a file describes, and watch it
  det-core search preview search.yaml                 its rungs, brackets and budget, before anything runs
  det-core experiment list                            experiments of this master, newest first
  det-core e logs latest -f                           watch the newest one again (`e` is short for experiment)
  det-core e pause 3; det-core e activate 3           its trials save and stop, and resume
  det-core e download-checkpoint 3 model              the best model of experiment 3, into the directory model
  det-core t metrics 12 --group validation            metrics of trial 12
  det-core master up --slots 4                        let four trials run at a time on this machine
  det-core runs list                                  runs without a master, newest first
  det-core runs export latest --format csv > out.csv  all metrics of a run as a table
  det-core checkpoint download latest model           the newest checkpoint of the newest run
  eval "$(det-core completion bash)"                  completes commands and IDs in this shell

`det-core COMMAND --help` says more. Everything is kept in DET_CORE_HOME, else in the platform's user data directory."""


@click.group(cls=RootGroup, help=_DESCRIPTION, epilog=_EXAMPLES)
@click.version_option(package_name="det-core", message="det-core %(version)s", help="Print the version.")
@click.option("--traceback", is_flag=True, help="Show where an error was raised.")
def app(traceback: bool) -> None:
    """Run one command of the groups."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: arguments after the program's name. Defaults to those of this process.

    Returns:
        0 if it succeeded, 1 if it failed, 2 if the command line is invalid, 130 if it was interrupted, and the
        statuses of :mod:`det_core.cli._output`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    trace = arguments[:1] == ["--traceback"]  # read here: an error in the command line has no context yet
    open_standard_streams()
    if sys.stdout is None:  # closed, as some daemons start a command
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays for as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may not be UTF-8, and a terminal may show less than that
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return DONE
    except (KeyboardInterrupt, click.Abort):
        error("interrupted")
        return INTERRUPTED
    except click.ClickException as e:
        error(_describe_usage_error(e))
        return e.exit_code
    except Exception as e:
        if trace:
            raise
        error(_describe(e))
        return FAILED
    finally:  # a stream that takes no more would change the exit status at exit
        for stream in (sys.stdout, sys.stderr):
            write_quietly("", stream)


def _run(arguments: list[str]) -> int:
    from det_core._env import completion_request

    if request := completion_request():
        from det_core.cli.completion import complete

        return complete(app, request)
    # Not by app.main(): it prints an empty line at Ctrl-C, and ends with 1 where a reader has seen enough.
    try:
        with app.make_context("det-core", arguments) as context, warnings_as_notes():
            return app.invoke(context) or DONE
    except click.exceptions.Exit as e:
        return e.exit_code


def _describe_usage_error(e: click.ClickException) -> str:
    """Return a mistake in a command line as one line."""
    text = " ".join(e.format_message().split())
    if not isinstance(e, click.UsageError):
        return text
    text = text[:1].lower() + text[1:].rstrip(".")  # click writes sentences
    if e.ctx is None:
        return text
    return f"{text} (see {e.ctx.command_path} --help)"


def _describe(e: Exception) -> str:
    """Return an error as one line."""
    from det_core.errors import DetCoreError, StorageError

    plain = e.args[-1] if isinstance(e, StorageError) else e  # without "[Errno 13]"
    text = " ".join(str(plain).split())
    if isinstance(e, DetCoreError | ValueError | OSError) and text:
        return text
    return f"unexpected {type(e).__name__}: {text} (det-core --traceback … shows where)"
