"""Progress on a terminal: a few lines that stay at the bottom, below what the trials print."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from det_core.cli._say import number
from det_core.cli.experiment._lines import head_of, text_of
from det_core.cli.experiment._told import duration, settings, state_of, state_of_all, still_saves

if TYPE_CHECKING:
    from det_core.client import Experiment, Trial

SHOWN = 8
"""Trials that are shown at a time, those at work first."""
AT_WORK = ("RUNNING", "STARTING", "PULLING")
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Live:
    """Shows lines as they come, and below them how things stand."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._live = RichLive(console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False)
        self._live.start()
        self._open = True

    def line(self, trial: Trial, line: dict[str, Any]) -> None:
        """A line that was printed."""
        colour = _COLOURS[trial.id % len(_COLOURS)]
        self._console.print(Text.assemble((head_of(trial), colour), Text.from_ansi(text_of(line))), soft_wrap=True)

    def state(self, experiment: Experiment, trials: list[Trial]) -> None:
        """How things stand."""
        self._live.update(Group(_trials(experiment, trials), _summary(experiment, trials)))

    def waits(self, why: str) -> None:
        """Nothing runs, for this reason."""
        self._console.print(Text(why, style="yellow"), soft_wrap=True)

    def close(self) -> None:
        """Nothing more comes."""
        if self._open:
            self._open = False
            self._live.stop()


def _trials(experiment: Experiment, trials: list[Trial]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for column in ("TRIAL", "STATE", "STEP", experiment.metric or "METRIC", "HYPERPARAMETERS"):
        table.add_column(column, header_style="dim", no_wrap=True)
    order = sorted(trials, key=lambda t: (t.state not in AT_WORK, t.ended, -t.id))
    for trial in sorted(order[:SHOWN], key=lambda t: t.id):
        best = "-" if trial.best_metric is None else number(trial.best_metric)
        row = (str(trial.id), state_of(trial), str(trial.steps_completed), best, settings(trial.hparams))
        style = None if trial.state in AT_WORK else "dim"
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def _summary(experiment: Experiment, trials: list[Trial]) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    took = duration(time.time() - float(experiment.info.get("start_time") or time.time()))
    states = Counter(state_of(trial) for trial in trials)
    counted = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))
    best = ""
    if experiment.best_metric is not None:
        best = f"best {experiment.metric} {number(experiment.best_metric)} (trial {experiment.info['best_trial_id']})"
    line.add_row(
        Text(f"experiment {experiment.id} {state_of_all(experiment)}", style="bold"),
        ProgressBar(total=1.0, completed=experiment.progress, width=20),
        Text(f"{experiment.progress:.0%}"),
        Text(took),
        Text(counted),
        Text(best, style="bold green"),
        Text(still_saves(experiment), style="yellow"),
    )
    return line
