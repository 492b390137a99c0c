"""Watching an experiment until it ends: its log lines, and what becomes of it and its trials."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._options import command_for
from det_core.cli._output import FAILED, INTERRUPTED, duration, error, interrupted_by_sigterm, note, number, printable
from det_core.cli._views import experiment_state, first_line, saving_trials, settings, trial_state
from det_core.errors import MasterUnreachable

if TYPE_CHECKING:
    from rich.table import Table

    from det_core.client import Experiment, Trial

RETRY_INTERVAL = 1.0
MASTER_TIMEOUT = 120.0
"""Seconds that a master may be away, as when it is restarted."""
MIN_POLL_INTERVAL = 0.1
MAX_POLL_INTERVAL = 1.0
"""Seconds between two looks: short at first, and while something happens."""
LOAD_FACTOR = 10
"""Requests for states that take long are followed by a pause this many times as long: a large search is not slowed."""
QUEUE_DELAY = 1.0
"""Seconds that a trial may be queued before the reason is printed."""
_HOLDING = ("RUNNING", "STARTING", "PULLING", "PAUSING")


def follow(
    experiment: Experiment,
    print_line: Callable[[dict[str, Any]], None] | None,
    *,
    tail: int | None = None,
    with_states: bool = False,
) -> None:
    """Watch an experiment until it has ended.

    Args:
        experiment: experiment, which is refreshed all the time.
        print_line: prints a log line of one of its trials; None prints nothing at all.
        tail: number of lines to begin with. Defaults to all so far.
        with_states: whether to print what becomes of the experiment and its trials, and on a terminal its progress.

    Raises:
        Exit: If the user interrupts, or the master is away for too long; how to come back is printed.
    """
    watch = command_for("experiment", "logs", experiment.id, "-f")
    try:
        with interrupted_by_sigterm(), _progress_line(with_states) as show:
            _watch(_Follower(experiment, print_line, tail, with_states, show))
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


def _watch(follower: _Follower) -> None:
    """Look again and again until the end; wait for a master that is away for a while."""
    deadline = None
    interval = MIN_POLL_INTERVAL
    while True:
        try:
            count = follower.look()
            deadline = None
        except MasterUnreachable as e:
            if deadline is None:
                deadline = time.monotonic() + MASTER_TIMEOUT
                note(f"{e}; trials go on, and it is asked again for {MASTER_TIMEOUT:.0f} s")
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_INTERVAL)
            continue
        if follower.is_over:
            return
        interval = MIN_POLL_INTERVAL if count else min(interval * 1.3, MAX_POLL_INTERVAL)
        time.sleep(max(interval, LOAD_FACTOR * follower.seconds_of_states))


class _Follower:
    """An experiment that is followed, look by look; :func:`follow` has the arguments.

    Attributes:
        is_over: whether the experiment has ended and every line was printed.
        seconds_of_states: time that the requests for states took at the last look; lines may take any time.
    """

    def __init__(
        self,
        experiment: Experiment,
        print_line: Callable[[dict[str, Any]], None] | None,
        tail: int | None,
        with_states: bool,
        show: Callable[[Experiment, list[Trial]], None],
    ) -> None:
        self.is_over = False
        self.seconds_of_states = 0.0
        self._experiment = experiment
        self._print_line = print_line
        self._tail = tail
        self._with_states = with_states
        self._show = show
        self._cursor = ""
        self._queue = Queue()
        self._shown: dict[int, tuple[str, int]] = {}
        self._shown_state = ""

    def look(self) -> int:
        """Print what is new; return the number of lines.

        Raises:
            MasterUnreachable: If no master answers; the next look goes on where this one ended.
        """
        began = time.monotonic()
        # Asked before the lines are read: what is printed before the end is then among them.
        ended = self._experiment.refresh().ended
        count = 0
        trials = []
        if self._print_line is not None:
            trials = self._experiment.trials()
        self.seconds_of_states = time.monotonic() - began
        if self._print_line is not None:
            for line in self._experiment.logs(after=self._cursor, tail=self._tail):
                self._print_line(line)
                count += 1
                if cursor := line.get("cursor"):
                    self._cursor = cursor
                    self._tail = None
            if why := self._queue.explain(self._experiment, trials):
                note(why)
        if self._with_states:
            self._print_states(trials)
            self._show(self._experiment, trials)
        self.is_over = ended
        return count

    def _print_states(self, trials: list[Trial]) -> None:
        """Print on stderr which states have changed."""
        for trial in trials:
            before = self._shown.get(trial.id)
            now = (trial_state(trial), trial.restarts)
            if now != before:
                self._shown[trial.id] = now
                note(f"trial {trial.id} {now[0]}{_details(self._experiment, trial, before)}")
        state = experiment_state(self._experiment)
        if state != self._shown_state:
            self._shown_state = state
            saving = saving_trials(self._experiment)
            note(": ".join(filter(None, [f"experiment {self._experiment.id} {state}", saving])))


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


class Queue:
    """Reasons why no trial of an experiment runs: each returned once, after a while."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._explained = ""

    def explain(self, experiment: Experiment, trials: Sequence[Trial]) -> str:
        """Return why nothing of it runs, if that is so and was not returned yet; else empty."""
        if experiment.ended or any(trial.state in _HOLDING for trial in trials):
            self._since = time.monotonic()
            self._explained = ""
            return ""
        # Nearly every trial is queued for a moment.
        if self._explained == experiment.state or time.monotonic() < self._since + QUEUE_DELAY:
            return ""
        why = _why_queued(experiment, trials)
        if why:
            self._explained = experiment.state
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
