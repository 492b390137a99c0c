"""Watching an experiment until it ends: its log lines, and what becomes of it and its trials."""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._options import command_for
from det_core.cli._output import (
    FAILED,
    INTERRUPTED,
    duration,
    error,
    interrupted_by_sigterm,
    note,
    number,
    number_or_dash,
    printable,
)
from det_core.cli._views import (
    experiment_state,
    first_line,
    line_head,
    line_text,
    print_line,
    saving_trials,
    settings,
    trial_state,
)
from det_core.errors import MasterUnreachable

if TYPE_CHECKING:
    from rich.table import Table

    from det_core.client import Experiment, Master, Trial

Lines = list[tuple["Trial", dict[str, Any]]]

RETRY_INTERVAL = 1.0
MASTER_TIMEOUT = 120.0
"""Seconds that a master may be away, as when it is restarted."""
MIN_POLL_INTERVAL = 0.1
MAX_POLL_INTERVAL = 1.0
"""Seconds between two requests: short at first, and while something happens."""
LOAD_FACTOR = 10
"""A request that takes long is followed by a pause this many times as long, so that a large search is not slowed."""
QUEUE_DELAY = 1.0
"""Seconds that a trial may be queued before the reason is printed."""
QUEUE_INTERVAL = 5.0
"""Seconds between two requests for what holds the slots."""
MAX_HOLDERS = 5
MAX_LIVE_TRIALS = 8
"""Trials that a terminal shows at a time, running ones first."""
_SILENT = ("PAUSED", "ACTIVE", "WAITING")
_AT_WORK = ("RUNNING", "STARTING", "PULLING")
_HOLDING = (*_AT_WORK, "PAUSING")
_UNENDED = ("ACTIVE", "PAUSED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_COMPLETED", "STOPPING_ERROR")
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


def follow(experiment: Experiment, *, quiet: bool = False, raw: bool = False) -> None:
    """Watch an experiment until it has ended.

    Args:
        experiment: experiment, which is refreshed all the time.
        quiet: whether to print nothing.
        raw: whether to print lines alone, each where the script has printed it.

    Raises:
        Exit: If the user interrupts, or the master is away for too long; how to come back is printed.
    """
    printer: _Printer = _Plain()
    if quiet:
        printer = _Printer()
    elif raw:
        printer = _Raw()
    elif sys.stdout.isatty():
        printer = Live()
    try:
        with interrupted_by_sigterm():
            _watch(experiment, printer, quiet)
    except MasterUnreachable as e:
        printer.close()
        error(str(e))
        note(_how_to_return(experiment))
        raise click.exceptions.Exit(FAILED) from None
    except KeyboardInterrupt:
        printer.close()
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below the ^C
        note(f"experiment {experiment.id} goes on; to watch it: {_command(experiment, 'logs', '-f')}")
        note(f"to stop it: {_command(experiment, 'cancel')}")
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        printer.close()


def _watch(experiment: Experiment, printer: _Printer, quiet: bool) -> None:
    tail = Tail(experiment.master, experiment)
    queue = Queue()
    while not tail.is_over:
        for trial, line in _read_patiently(tail):
            printer.line(trial, line)
        printer.state(experiment, tail.trials)
        if not quiet and (why := queue.explain(experiment, tail.trials)):
            printer.waiting(why)
        if not tail.is_over:
            tail.pause()


def _read_patiently(tail: Tail) -> Lines:
    """Return the new lines; wait for a master that is away for a while."""
    deadline = None
    while True:
        try:
            return tail.read()
        except MasterUnreachable as e:
            if deadline is None:
                deadline = time.monotonic() + MASTER_TIMEOUT
                note(f"{e}; trials go on, and it is asked again for {MASTER_TIMEOUT:.0f} s")
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_INTERVAL)


def _how_to_return(experiment: Experiment) -> str:
    from det_core._env import Environment

    options = click.get_current_context().params
    is_own = not options.get("master") and (options.get("home") or Environment.read().master is None)
    how = "to watch again when the master is back"
    if is_own:
        how = "to start the master again and watch"
    return f"trials go on without the master; {how}: {_command(experiment, 'logs', '-f')}"


def _command(experiment: Experiment, name: str, *more: str) -> str:
    return command_for("experiment", name, experiment.id, *more)


def all_lines(experiment: Experiment, tail: int | None = None) -> Iterable[tuple[Trial, dict[str, Any]]]:
    """Return the lines of an experiment's trials so far in the order of their times, or the last of them."""
    logs = [zip(repeat(trial), trial.logs(tail=tail), strict=False) for trial in experiment.trials()]
    lines = heapq.merge(*logs, key=_time)
    return lines if tail is None else deque(lines, tail)


def _time(pair: tuple[Trial, dict[str, Any]]) -> float:
    return float(pair[1].get("timestamp") or 0.0)


class Tail:
    """New log lines of an experiment, each once.

    Args:
        master: its master.
        experiment: experiment, which each read refreshes.

    Attributes:
        trials: trials, as of the last read.
        is_over: whether the experiment has ended and every line was returned.
    """

    def __init__(self, master: Master, experiment: Experiment) -> None:
        self._master = master
        self.experiment = experiment
        self.trials: list[Trial] = []
        self.is_over = False
        self._last_ids: dict[int, str] = {}
        self._settled: dict[int, tuple[Any, ...]] = {}
        self._took = 0.0
        self._pause = MIN_POLL_INTERVAL

    def read(self) -> Lines:
        """Return the new lines with their trials, in the order in which they were printed."""
        began = time.monotonic()
        # Asked before the lines are read: what is printed before the end is then among them.
        ended = self.experiment.refresh().ended
        self.trials = self.experiment.trials()
        pages = []
        more = False
        for trial in self.trials:
            page, is_full = self._read_trial(trial)
            pages.append([(trial, line) for line in page])
            more |= is_full
        lines = list(heapq.merge(*pages, key=_time))
        self.is_over = ended and not more
        self._took = time.monotonic() - began
        if more:
            self._pause = 0.0
        elif lines:
            self._pause = MIN_POLL_INTERVAL
        else:
            self._pause = min(max(self._pause, MIN_POLL_INTERVAL) * 1.3, MAX_POLL_INTERVAL)
        return lines

    def pause(self) -> None:
        """Wait until the next read is due."""
        if self._pause:
            time.sleep(max(self._pause, LOAD_FACTOR * self._took))

    def _read_trial(self, trial: Trial) -> tuple[list[dict[str, Any]], bool]:
        """Return the new lines of a trial, and whether there may be more already."""
        from det_core.client._experiments import PAGE, log_page

        state = trial_state(trial)
        mark = (state, trial.record.trial_run_id)  # a later run prints anew, in the same state
        if self._settled.get(trial.id) == mark:
            return [], False
        page = log_page(self._master, trial.id, self._last_ids.get(trial.id, ""))
        if page:
            self._last_ids[trial.id] = page[-1]["id"]
        elif trial.ended or state in _SILENT:
            self._settled[trial.id] = mark  # it prints nothing more in this state
        return page, len(page) >= PAGE


class Queue:
    """Reasons why no trial of an experiment runs: each printed once, after a while."""

    def __init__(self) -> None:
        self._due = time.monotonic() + QUEUE_DELAY
        self._printed = ""

    def explain(self, experiment: Experiment, trials: Sequence[Trial]) -> str:
        """Return why nothing of it runs, if that is so and was not returned yet; else empty."""
        now = time.monotonic()
        if experiment.ended or any(trial.state in _HOLDING for trial in trials):
            self._due = now + QUEUE_DELAY
            self._printed = ""
            return ""
        if now < self._due:
            return ""  # nearly every trial is queued for a moment
        self._due = now + QUEUE_INTERVAL
        why = _why_queued(experiment, trials)
        if why == self._printed:
            return ""
        self._printed = why
        return why


def _why_queued(experiment: Experiment, trials: Sequence[Trial]) -> str:
    if experiment.state == "PAUSED":
        return f"experiment {experiment.id} is paused; to resume it: `{_command(experiment, 'activate')}`"
    if not any(trial.state == "QUEUED" for trial in trials):
        return ""
    about = experiment.master.get("master")
    slots = int(about.get("slots") or 0)
    used = int(about.get("slotsInUse") or 0)
    needed = experiment.config.get("resources", {}).get("slots_per_trial", 1)
    others = _holders(experiment)
    text = f"queued: a trial of experiment {experiment.id} needs {needed} slot(s), and {used} of {slots} are in use"
    return ": ".join(filter(None, [text, ", ".join(others)]))


def _holders(experiment: Experiment) -> list[str]:
    """Return the other experiments of which trials hold slots."""
    from det_core.client._experiments import Experiment

    master = experiment.master
    views = master.get("experiments", states=[f"STATE_{name}" for name in _UNENDED], limit=100)["experiments"]
    holders = []
    for other in (Experiment(master, view) for view in views):
        count = 0
        if other.id != experiment.id:
            count = sum(t.state in _HOLDING or t.state.startswith("STOPPING") for t in other.trials())
        if count:
            holders.append(f"experiment {other.id} ({other.name}) has {count} trial(s) at work")
    return holders[:MAX_HOLDERS] + ["…"] * (len(holders) > MAX_HOLDERS)


class _Printer:
    """Printer of an experiment's news; this one prints nothing."""

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """Print a log line."""

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """Print what has changed."""

    def waiting(self, why: str) -> None:
        """Print why nothing runs."""

    def close(self) -> None:
        """Give the terminal back."""


class _Raw(_Printer):
    """Prints what a script prints as if it ran here."""

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        stream = sys.stderr if line.get("stdtype") == "stderr" else sys.stdout
        print(line_text(line), file=stream, flush=True)

    def waiting(self, why: str) -> None:
        note(why)


class _Plain(_Printer):
    """Prints lines on stdout, and on stderr what becomes of experiment and trials."""

    def __init__(self) -> None:
        self._trials: dict[int, tuple[str, int]] = {}
        self._experiment = ""
        self._explained_waiting = False

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        print_line(trial, line)

    def waiting(self, why: str) -> None:
        note(why)

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        for trial in trials:
            before = self._trials.get(trial.id)
            now = (trial_state(trial), trial.restarts)
            if now != before:
                self._trials[trial.id] = now
                note(f"trial {trial.id} {now[0]}{self._details(experiment, trial, before)}")
        state = experiment_state(experiment)
        if state != self._experiment:
            self._experiment = state
            saving = saving_trials(experiment)
            note(": ".join(filter(None, [f"experiment {experiment.id} {state}", saving])))

    def _details(self, experiment: Experiment, trial: Trial, before: tuple[str, int] | None) -> str:
        """Return what is worth a word about a trial whose state has changed."""
        text = ""
        if before is None:
            text = f": {settings(trial.hparams)}"
        if trial_state(trial) == "WAITING" and not self._explained_waiting:
            self._explained_waiting = True
            text += " (for the search, which may have it train more)"
        if trial.ended and trial.best_metric is not None:
            text += f" ({experiment.metric} {number(trial.best_metric)})"
        if trial.state == "ERROR" and trial.error:
            text += f" ({first_line(trial.error)})"
        elif trial.restarts and (before is None or before[1] != trial.restarts):
            cause = first_line(trial.error or "")
            text += f" ({': '.join(filter(None, [f'restart {trial.restarts}', cause]))})"
        return text


class Live(_Printer):
    """Shows on a terminal lines as they come, and below them a few lines with the progress."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(soft_wrap=True, highlight=False)
        self._live = RichLive(console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False)
        self._live.start()
        self._is_open = True

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """Print a line above the progress."""
        from rich.text import Text

        colour = _COLOURS[trial.id % len(_COLOURS)]
        self._console.print(Text.assemble((line_head(trial), colour), Text.from_ansi(line_text(line))), soft_wrap=True)

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """Show the progress."""
        from rich.console import Group

        self._live.update(Group(_live_trials(experiment, trials), _live_summary(experiment, trials)))

    def waiting(self, why: str) -> None:
        """Print why nothing runs."""
        from rich.text import Text

        self._console.print(Text(printable(why), style="yellow"), soft_wrap=True)

    def close(self) -> None:
        """Remove the progress."""
        if self._is_open:
            self._is_open = False
            self._live.stop()


def _live_trials(experiment: Experiment, trials: list[Trial]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for column in ("TRIAL", "STATE", "STEP", printable(experiment.metric) or "METRIC", "HYPERPARAMETERS"):
        table.add_column(column, header_style="dim", no_wrap=True)
    # A terminal has few lines: those that run, then those that may run, the newest first; shown by their numbers.
    order = sorted(trials, key=lambda t: (t.state not in _AT_WORK, t.ended, -t.id))
    for t in sorted(order[:MAX_LIVE_TRIALS], key=lambda t: t.id):
        row = (t.id, trial_state(t), t.steps_completed, number_or_dash(t.best_metric), settings(t.hparams))
        # As Text: names and hyperparameters may hold brackets, which rich takes for markup.
        table.add_row(*(Text(printable(cell)) for cell in row), style="" if t.state in _AT_WORK else "dim")
    return table


def _live_summary(experiment: Experiment, trials: list[Trial]) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    states = Counter(trial_state(trial) for trial in trials)
    best = ""
    if experiment.best_metric is not None:
        best = f"best {experiment.metric} {number(experiment.best_metric)} (trial {experiment.record.best_trial_id})"
    line.add_row(
        Text(f"experiment {experiment.id} {experiment_state(experiment)}", style="bold"),
        ProgressBar(total=1.0, completed=experiment.progress, width=20),
        Text(f"{experiment.progress:.0%}"),
        Text(duration(time.time() - experiment.record.start_time)),
        Text(", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))),
        Text(printable(best), style="bold green"),
        Text(saving_trials(experiment), style="yellow"),
    )
    return line
