"""The check: five trainings one after the other, compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_core.check_resume._compare import Difference, compare, is_time
from det_core.check_resume._diagnosis import Finding, diagnose, merge
from det_core.check_resume._facts import describe_failure, gather
from det_core.check_resume._plans import BEFORE_ANY_REPORT, kill_plan, stop_plan
from det_core.check_resume._records import Training, read_training
from det_core.check_resume._states import different_keys
from det_core.check_resume._trainings import Home, timeout_after

MAX_BATCHES = 1_000_000
"""Batches of the second undisturbed training that are noted."""
UNDISTURBED, AGAIN, STOPPED, KILLED, ENDED = "undisturbed", "undisturbed again", "stopped", "killed", "after its end"


@dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        command: the command.
        findings: what is wrong, the likeliest cause first; empty: it resumes exactly.
        trainings: the trainings that were made.
        folder: their homes; None: they are removed.
        seconds: how long all took.
        remarks: what the check could not prove.
    """

    command: tuple[str, ...]
    findings: tuple[Finding, ...]
    trainings: tuple[Training, ...]
    folder: Path | None
    seconds: float
    remarks: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every training ended as the undisturbed one."""
        return not self.findings


def check_resume(
    command: Sequence[str],
    folder: Path,
    *,
    keep: bool = False,
    at: int | None = None,
    kill_only: bool = False,
    rtol: float = 0.0,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> Report:
    """Train undisturbed twice, stopped, killed, and resumed after the end, and compare.

    Args:
        command: what starts the training.
        folder: an empty folder for the homes of the trainings.
        keep: whether it stays if nothing is wrong.
        at: the step after whose report the training is stopped, and killed. Defaults to None: after two fifths; the
            kill between two checkpoints.
        kill_only: whether to leave out the stop, for a script that never calls ``should_preempt()``.
        rtol: relative tolerance of numbers. Defaults to 0: they are equal.
        on_progress: called with a line for a person.

    Raises:
        ValueError: If the command cannot be run, or ``at`` is not a step of the training.
    """
    began = time.monotonic()
    check = _Check(command, folder, 4 if kill_only else 5, on_progress)
    undisturbed = check.train(UNDISTURBED, {})
    if finding := _unusable(undisturbed):
        return Report(tuple(command), (finding,), (undisturbed,), folder, time.monotonic() - began)
    check.timeout = timeout_after(undisturbed.starts[0])
    check.end = undisturbed.steps(undisturbed.main_group)[-1]
    interrupted = []
    if not kill_only:
        interrupted.append(check.train(STOPPED, stop_plan(undisturbed, at), resumed=True))
    interrupted.append(check.train(KILLED, kill_plan(undisturbed, at), resumed=True))
    moments = {save.forwards: one.name for one in interrupted if (save := one.save_restored(1)) is not None}
    calls = {stop["calls"] + 1: one.name for one in interrupted for stop in one.starts[0].noted("stop")}
    again = check.train(AGAIN, {"snapshots": moments, "snapshots_at_calls": calls, "batches": MAX_BATCHES})
    ended = check.resume_ended(undisturbed)
    findings = _judge(undisturbed, again, interrupted, ended, rtol)
    is_kept = keep or bool(findings)
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    return Report(
        command=tuple(command),
        findings=tuple(findings),
        trainings=(undisturbed, again, *interrupted, ended),
        folder=folder if is_kept else None,
        seconds=time.monotonic() - began,
        remarks=tuple(_remarks(undisturbed, interrupted[-1])),
    )


class _Check:
    """The trainings of one check.

    Args:
        command: what starts the training.
        folder: where their homes are made.
        count: how many there will be.
        on_progress: called with a line for a person.

    Attributes:
        timeout: maximum time of a start in seconds; None: no limit.
        end: the last step; -1: not known yet.
    """

    def __init__(self, command: Sequence[str], folder: Path, count: int, on_progress: Callable[[str], None]) -> None:
        self.timeout: float | None = None
        self.end = -1
        self._command, self._folder, self._count = command, folder, count
        self._on_progress = on_progress
        self._begun = 0
        self._title = ""
        self._homes: dict[str, Home] = {}

    def train(self, name: str, plan: dict[str, Any], *, resumed: bool = False) -> Training:
        """Train in a new home.

        Args:
            name: the training's name.
            plan: what the probe is to do.
            resumed: whether to start the command again after it was stopped or killed.
        """
        home = Home(self._folder / name.replace(" ", "-"), self._command, self._show_step)
        self._homes[name] = home
        self._show(f"{name}{_moment(plan)}")
        starts = [home.run(plan, self.timeout)]
        if resumed and not describe_failure((starts[0],)) and (starts[0].is_killed or starts[0].noted("stop")):
            self._title += ", resumed"
            self._on_progress(self._title)
            starts.append(home.run({"resumed": True, "batches": 1}, self.timeout))
        return read_training(name, home.path, tuple(starts))

    def resume_ended(self, undisturbed: Training) -> Training:
        """Start the command once more in the home of the undisturbed training."""
        self._show(ENDED)
        home = self._homes[UNDISTURBED]
        return read_training(ENDED, home.path, (*undisturbed.starts, home.run({}, self.timeout)))

    def _show(self, title: str) -> None:
        self._begun += 1
        self._title = f"training {self._begun} of {self._count}, {title}"
        self._on_progress(self._title)

    def _show_step(self, step: int) -> None:
        if step >= 0:
            self._on_progress(f"{self._title}: step {step}" + (f" of {self.end}" if self.end >= 0 else ""))


def _moment(plan: dict[str, Any]) -> str:
    """Return when a training is disturbed, in words; empty: it is not."""
    step = plan.get("stop_at", plan.get("kill_at"))
    if step == BEFORE_ANY_REPORT:
        return f" at call {plan['stop_after_calls'] + 1} of should_preempt()"
    return "" if step is None else f" at step {step}"


def _unusable(undisturbed: Training) -> Finding | None:
    """Return why nothing can be compared."""
    text = describe_failure(undisturbed.starts)
    if not text and not undisturbed.runs:
        text = "the command never called core.init()"
    if not text and not undisturbed.rows:
        text = "the command reported no metrics"
    return Finding("command_failed", text, trainings=(UNDISTURBED,)) if text else None


def _judge(
    undisturbed: Training, again: Training, interrupted: Sequence[Training], ended: Training, rtol: float
) -> list[Finding]:
    """Return what is wrong."""
    findings = []
    difference = compare(undisturbed, again, rtol=rtol)
    noise: frozenset[str] = frozenset()
    if failure := describe_failure(again.starts):
        findings.append([Finding("command_failed", failure, trainings=(AGAIN,))])
    elif difference:
        findings.append([_unequal(difference)])
    elif undisturbed.saves and again.saves:
        # What differs although nothing was disturbed, as a time does, says nothing of a resume.
        noise = frozenset(different_keys(undisturbed.saves[-1].path, again.saves[-1].path, rtol))
    observed = None if difference or failure else again
    for training in interrupted:
        findings.append(diagnose(gather(training, undisturbed, observed, rtol=rtol, noise=noise)))
    merged = merge(findings)
    if not any(finding.cause in _FOLLOWED_BY_A_NEW_START for finding in merged):
        merged += _of_ended(undisturbed, ended, observed is not None, rtol)
    return merged


def _remarks(undisturbed: Training, killed: Training) -> Iterator[str]:
    """Yield why equal trainings may prove less than they seem to."""
    if len(killed.starts) > 1 and not any(save.restart == 0 for save in killed.saves):
        yield "killed before the first checkpoint, so it started over; --at STEP chooses a later step"
    rows = [
        {key: value for key, value in row.items() if not is_time(key)}
        for row in undisturbed.rows[undisturbed.main_group].values()
    ]
    if len(rows) > 1 and all(row == rows[0] for row in rows):
        yield (
            f"every row of group {undisturbed.main_group} has the same values, so that no mistake would show in them: "
            "report a loss that changes"
        )


_FOLLOWED_BY_A_NEW_START = ("never_asked", "starts_over", "several_runs", "command_failed")
"""Causes by which a run that is resumed after its end trains again, too."""


def _unequal(difference: Difference) -> Finding:
    places = [*difference.missing, *difference.extra, *((change.group, change.step) for change in difference.changed)]
    step = min((step for _, step in places), default=None)
    what = f" ({difference.changed[0]})" if difference.changed else ": they have other rows"
    return Finding(
        "undisturbed_runs_differ",
        f"two undisturbed trainings differ from step {step} on{what}; only counts were compared: set seeds, and "
        "deterministic algorithms; --rtol allows for a difference",
        step,
        (UNDISTURBED, AGAIN),
    )


def _of_ended(undisturbed: Training, ended: Training, is_deterministic: bool, rtol: float) -> list[Finding]:
    """Return what is wrong with the run that was resumed after its end."""
    if failure := describe_failure(ended.starts):
        return [Finding("command_failed", f"after its end, {failure}", trainings=(ENDED,))]
    group = undisturbed.main_group
    again = [step for name, step in ended.reported.get(1, ()) if name == group]
    if again:
        text = f"resumed after its end, the training went on: steps {again[0]} to {again[-1]} were trained again"
        return [Finding("trains_after_end", text, again[0], (ENDED,))]
    if is_deterministic and undisturbed.saves and len(ended.saves) > len(undisturbed.saves):
        keys = different_keys(undisturbed.saves[-1].path, ended.saves[-1].path, rtol)
        if keys:
            text = f"resumed after its end, it saved another final checkpoint: {', '.join(keys[:3])}"
            return [Finding("checkpoint_differs", text, None, (ENDED,))]
    return []
