"""Watching an experiment until it ends: log lines above, and on a terminal its progress below them."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from det_core.cli._say import error, note
from det_core.cli._session import command_for
from det_core.cli._signals import interrupted_by_sigterm
from det_core.cli._status import FAILED, INTERRUPTED
from det_core.cli.experiment._lines import print_line, print_raw
from det_core.cli.experiment._queue import Queue
from det_core.cli.experiment._tail import Tail
from det_core.errors import MasterUnreachable

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

PATIENCE = 120.0
"""Seconds that a master may be away, as when it is started anew."""


class Show(Protocol):
    """Who shows the news of an experiment."""

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """A line that was printed."""

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """How things stand."""

    def waits(self, why: str) -> None:
        """Nothing runs, for this reason."""

    def close(self) -> None:
        """Nothing more comes."""


def follow(args: argparse.Namespace, experiment: Experiment, *, quiet: bool = False, raw: bool = False) -> None:
    """Watch until the experiment has ended.

    Args:
        args: of the command, for the commands that are named.
        experiment: refreshed all the time.
        quiet: print nothing of it.
        raw: it is one script: print what it prints, where it prints it, and no more.

    Raises:
        SystemExit: the user has seen enough, or the master is away for too long; how to come back is told.
    """
    show: Show = Nothing() if quiet else Raw() if raw else _for_people()
    tail, queue = Tail(experiment.master, experiment), Queue()
    try:
        with interrupted_by_sigterm():
            while not tail.over:
                for trial, line in _patiently(tail):
                    show.line(trial, line)
                show.state(experiment, tail.trials)
                if not quiet and (why := queue.news(experiment, tail.trials)):
                    show.waits(why)
                if not tail.over:
                    tail.pause()
    except MasterUnreachable as e:
        show.close()
        error(str(e))
        note(_come_back(args, experiment))
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        show.close()
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below the ^C
        note(f"experiment {experiment.id} goes on; to watch it: {_command(args, experiment, 'logs', '-f')}")
        note(f"to stop it: {_command(args, experiment, 'cancel')}")
        raise SystemExit(INTERRUPTED) from None
    finally:
        show.close()


class Nothing:
    """Shows nothing."""

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """A line that was printed."""

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """How things stand."""

    def waits(self, why: str) -> None:
        """Nothing runs, for this reason."""

    def close(self) -> None:
        """Nothing more comes."""


class Raw(Nothing):
    """Shows what a script prints as if it ran here."""

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """A line that was printed."""
        print_raw(line)

    def waits(self, why: str) -> None:
        """Nothing runs, for this reason."""
        note(why)


class Plain(Nothing):
    """Shows lines on stdout, and on stderr what becomes of experiment and trials."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[str, int]] = {}
        self._of_all = ""
        self._waited = False

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """A line that was printed."""
        print_line(trial, line)

    def waits(self, why: str) -> None:
        """Nothing runs, for this reason."""
        note(why)

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """How things stand."""
        from det_core.cli._say import number
        from det_core.cli.experiment._told import first_line, settings, state_of, state_of_all, still_saves

        for trial in trials:
            before = self._states.get(trial.id)
            now = (state_of(trial), trial.restarts)
            if now == before:
                continue
            self._states[trial.id] = now
            more = f": {settings(trial.hparams)}" if before is None else ""
            if now[0] == "WAITING" and not self._waited:
                self._waited = True
                more += " (for the search, which may have it train more)"
            if trial.ended and trial.best_metric is not None:
                more += f" ({experiment.metric} {number(trial.best_metric)})"
            if trial.state == "ERROR" and trial.error:
                more += f" ({first_line(trial.error)})"
            elif trial.restarts and (before is None or before[1] != trial.restarts):
                more += f" (restart {trial.restarts}{': ' + first_line(trial.error) if trial.error else ''})"
            note(f"trial {trial.id} {now[0]}{more}")
        if (now_is := state_of_all(experiment)) != self._of_all:
            self._of_all = now_is
            saving = still_saves(experiment)
            note(f"experiment {experiment.id} {now_is}" + (f": {saving}" if saving else ""))


def _for_people() -> Show:
    if not sys.stdout.isatty():
        return Plain()
    from det_core.cli.experiment._live import Live

    return Live()


def _patiently(tail: Tail) -> list[tuple[Trial, dict[str, Any]]]:
    """The news, also if the master is away for a while."""
    until = None
    while True:
        try:
            return tail.new()
        except MasterUnreachable as e:
            if until is None:
                until = time.monotonic() + PATIENCE
                note(f"{e}; trials go on, and it is asked again for {PATIENCE:.0f} s")
            if time.monotonic() > until:
                raise
            time.sleep(1.0)


def _come_back(args: argparse.Namespace, experiment: Experiment) -> str:
    from det_core._env import Environment

    own = args.master is None and (args.home is not None or Environment.read().master is None)
    how = "to start the master again and watch" if own else "to watch again when the master is back"
    return f"trials go on without the master; {how}: {_command(args, experiment, 'logs', '-f')}"


def _command(args: argparse.Namespace, experiment: Experiment, name: str, *more: str) -> str:
    return command_for(args, "experiment", name, experiment.id, *more)
