"""Watching an experiment until it ends: its log lines, and what becomes of it and its trials."""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._options import command_for
from det_core.cli._output import FAILED, INTERRUPTED, duration, error, interrupted_by_sigterm, note, number, printable
from det_core.cli._views import experiment_state, first_line, saving_trials, settings, trial_state
from det_core.errors import MasterUnreachable

if TYPE_CHECKING:
    from rich.table import Table

    from det_core.client import Experiment, Trial

PrintLine = Callable[["Trial", dict[str, Any]], None]
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
"""Seconds between two requests for how many slots are in use."""
_SILENT = ("PAUSED", "ACTIVE", "WAITING")
_HOLDING = ("RUNNING", "STARTING", "PULLING", "PAUSING")


def follow(experiment: Experiment, print_line: PrintLine | None, *, with_states: bool = False) -> None:
    """Watch an experiment until it has ended.

    Args:
        experiment: experiment, which is refreshed all the time.
        print_line: prints a log line of a trial; None prints nothing at all.
        with_states: whether to print what becomes of the experiment and its trials, and on a terminal its progress.

    Raises:
        Exit: If the user interrupts, or the master is away for too long; how to come back is printed.
    """
    watch = command_for("experiment", "logs", experiment.id, "-f")
    try:
        with interrupted_by_sigterm(), _progress_line(with_states) as show:
            _watch(experiment, print_line, with_states, show)
    except MasterUnreachable as e:
        error(str(e))
        note(f"trials go on without the master; to watch again: {watch}")
        raise click.exceptions.Exit(FAILED) from None
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below the ^C
        note(f"experiment {experiment.id} goes on; to watch it: {watch}")
        note(f"to stop it: {command_for('experiment', 'cancel', experiment.id)}")
        raise click.exceptions.Exit(INTERRUPTED) from None


def _watch(
    experiment: Experiment,
    print_line: PrintLine | None,
    with_states: bool,
    show: Callable[[Experiment, list[Trial]], None],
) -> None:
    tail = Tail(experiment)
    queue = Queue()
    states = _States()
    while not tail.is_over:
        lines = _read_patiently(tail)
        if print_line is not None:
            for trial, line in lines:
                print_line(trial, line)
            if why := queue.explain(experiment, tail.trials):
                note(why)
        if with_states:
            states.print_changes(experiment, tail.trials)
            show(experiment, tail.trials)
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
        experiment: experiment, which each read refreshes.

    Attributes:
        trials: trials, as of the last read.
        is_over: whether the experiment has ended and every line was returned.
    """

    def __init__(self, experiment: Experiment) -> None:
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
        page = log_page(trial.master, trial.id, self._last_ids.get(trial.id, ""))
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
        return f"experiment {experiment.id} is paused; to resume it: {command_for('e', 'activate', experiment.id)}"
    if not any(trial.state == "QUEUED" for trial in trials):
        return ""
    about = experiment.master.get("master")
    needed = experiment.config.get("resources", {}).get("slots_per_trial", 1)
    in_use = f"{about.get('slotsInUse')} of {about.get('slots')} are in use"
    return f"queued: a trial of experiment {experiment.id} needs {needed} slot(s), and {in_use}"


class _States:
    """States of an experiment and its trials, whose changes are printed on stderr."""

    def __init__(self) -> None:
        self._trials: dict[int, tuple[str, int]] = {}
        self._experiment = ""

    def print_changes(self, experiment: Experiment, trials: list[Trial]) -> None:
        for trial in trials:
            before = self._trials.get(trial.id)
            now = (trial_state(trial), trial.restarts)
            if now != before:
                self._trials[trial.id] = now
                note(f"trial {trial.id} {now[0]}{_details(experiment, trial, before)}")
        state = experiment_state(experiment)
        if state != self._experiment:
            self._experiment = state
            note(": ".join(filter(None, [f"experiment {experiment.id} {state}", saving_trials(experiment)])))


def _details(experiment: Experiment, trial: Trial, before: tuple[str, int] | None) -> str:
    """Return what is worth a word about a trial whose state has changed."""
    text = ""
    if before is None:
        text = f": {settings(trial.hparams)}"
    if trial.ended and trial.best_metric is not None:
        text += f" ({experiment.metric} {number(trial.best_metric)})"
    cause = first_line(trial.error or "")
    if trial.restarts and (before is None or before[1] != trial.restarts):
        cause = ": ".join(filter(None, [f"restart {trial.restarts}", cause]))
    elif trial.state != "ERROR":
        cause = ""
    return f"{text} ({cause})" if cause else text


@contextmanager
def _progress_line(is_wanted: bool) -> Iterator[Callable[[Experiment, list[Trial]], None]]:
    """Show the progress below all that is printed, if stdout is a terminal, until the block ends."""
    if not (is_wanted and sys.stdout.isatty()):
        yield lambda _experiment, _trials: None
        return
    from rich.console import Console
    from rich.live import Live

    # What is printed meanwhile comes out above it; stderr too, unless it goes elsewhere.
    console = Console(soft_wrap=True, highlight=False)
    with Live(console=console, refresh_per_second=4, transient=True, redirect_stderr=sys.stderr.isatty()) as live:
        yield lambda experiment, trials: live.update(_progress(experiment, trials))


def _progress(experiment: Experiment, trials: list[Trial]) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    states = Counter(trial_state(trial) for trial in trials)
    best = ""
    if experiment.best_metric is not None:
        best = f"best {experiment.metric} {number(experiment.best_metric)} (trial {experiment.record.best_trial_id})"
    # As Text: names may hold brackets, which rich takes for markup.
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
