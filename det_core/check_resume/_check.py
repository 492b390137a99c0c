"""The check: five trainings one after the other, compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.check_resume._compare import Difference, compare, is_time
from det_core.check_resume._diagnosis import Finding, diagnose, merge
from det_core.check_resume._facts import describe_failure, gather
from det_core.check_resume._plans import BEFORE_ANY_REPORT, end_plan, kill_plan, stop_plan
from det_core.check_resume._records import Training
from det_core.check_resume._states import different_keys
from det_core.check_resume._subjects import CommandSubject, Place, Subject
from det_core.check_resume._trainings import RESUMED_PLAN, timeout_after

if TYPE_CHECKING:
    from det_core.check_resume._trial import ExperimentSource

MAX_BATCHES = 1_000_000
"""Batches of the second undisturbed training that are noted."""
UNDISTURBED = "undisturbed"
AGAIN = "undisturbed again"
STOPPED = "stopped"
STOPPED_AT_END = "stopped at an epoch's end"
KILLED = "killed"
ENDED = "after its end"


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
    experiment: ExperimentSource | None = None,
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
        experiment: the experiment that the command creates, whose trial is checked under a master in ``folder``.
            Defaults to None: the command itself trains.
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
    with ExitStack() as stack:
        subject: Subject = CommandSubject(command)
        if experiment is not None:
            from det_core.check_resume._trial import TrialSubject

            subject = TrialSubject(folder, experiment)
            stack.callback(subject.close)
        check = _Check(subject, folder, kill_only, on_progress)
        undisturbed = check.train(UNDISTURBED, {})
        if finding := _unusable(undisturbed):
            return Report(tuple(command), (finding,), (undisturbed,), folder, time.monotonic() - began)
        interrupted, again, ended = check.train_others(undisturbed, at)
    findings = _judge(undisturbed, again, interrupted, ended, rtol)
    is_kept = keep or bool(findings)
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    return Report(
        command=tuple(command),
        findings=tuple(findings),
        trainings=(undisturbed, again, *interrupted, *ended),
        folder=folder if is_kept else None,
        seconds=time.monotonic() - began,
        remarks=tuple(_remarks(undisturbed, interrupted[-1], ended)),
    )


class _Check:
    """The trainings of one check.

    Args:
        subject: the training that is checked.
        folder: where their homes are made.
        kill_only: whether to leave out the stops.
        on_progress: called with a line for a person.
    """

    def __init__(self, subject: Subject, folder: Path, kill_only: bool, on_progress: Callable[[str], None]) -> None:
        self._timeout: float | None = None
        self._end = -1  # not known yet
        self._kill_only = kill_only
        self._subject = subject
        self._folder = folder
        self._count = 2 + subject.resumes_after_end  # and those that are interrupted
        self._on_progress = on_progress
        self._begun = 0
        self._title = ""
        self._places: dict[str, Place] = {}

    def train(self, name: str, plan: dict[str, Any], *, resumed: bool = False) -> Training:
        """Train in a new home.

        Args:
            name: the training's name.
            plan: what the probe is to do.
            resumed: whether to start it again after it was stopped or killed.
        """
        place = self._subject.place(self._folder / name.replace(" ", "-").replace("'", ""), self._show_step)
        self._places[name] = place
        self._begun += 1
        self._show(f"{name}{_moment(plan)}")
        starts = [place.run(plan, self._timeout)]
        event = "stop"
        if starts[0].is_killed:
            event = "kill"
        moments = starts[0].noted(event)
        if resumed and not describe_failure((starts[0],)) and moments:
            # The ranks agree on a later call of should_preempt() than that of the request.
            self._show(f"{name}{_after(moments[0]['step'], moments[0]['calls'])}, resumed")
            starts.append(place.run(RESUMED_PLAN, self._timeout))
        return place.read(name, tuple(starts))

    def train_others(self, undisturbed: Training, at: int | None) -> tuple[list[Training], Training, list[Training]]:
        """Make the other trainings, and return those that were interrupted, the second undisturbed one, the ended one.

        Args:
            undisturbed: the first.
            at: the step after which to interrupt; None: a step of the plans' choice.
        """
        self._timeout = timeout_after(undisturbed.starts[0])
        self._end = undisturbed.steps(undisturbed.main_group)[-1]
        plans: dict[str, dict[str, Any]] = {}
        if not self._kill_only:
            plans[STOPPED] = stop_plan(undisturbed, at)
            end = end_plan(undisturbed)
            if at is None and end is not None:
                plans[STOPPED_AT_END] = end
        plans[KILLED] = kill_plan(undisturbed, at)
        self._count += len(plans)
        interrupted = [self.train(name, plan, resumed=True) for name, plan in plans.items()]
        again = self.train(AGAIN, {**_snapshots(interrupted), "batches": MAX_BATCHES})
        return interrupted, again, self._resume_ended(undisturbed)

    def _resume_ended(self, undisturbed: Training) -> list[Training]:
        """Start the undisturbed training once more, after its end, if that can be done."""
        if not self._subject.resumes_after_end:
            return []
        self._begun += 1
        self._show(ENDED)
        place = self._places[UNDISTURBED]
        return [place.read(ENDED, (*undisturbed.starts, place.run({}, self._timeout)))]

    def _show(self, title: str) -> None:
        number = str(self._begun)
        if self._end >= 0:  # before the first training has ended, the number of plans is unknown
            number += f" of {self._count}"
        self._title = f"training {number}, {title}"
        self._on_progress(self._title)

    def _show_step(self, step: int) -> None:
        if step < 0:
            return
        progress = f"{self._title}: step {step}"
        if self._end >= 0:
            progress += f" of {self._end}"
        self._on_progress(progress)


def _snapshots(interrupted: Sequence[Training]) -> dict[str, Any]:
    """Return the part of a plan that has the states noted with which the interrupted trainings went on."""
    at_batches: dict[int, list[str]] = {}
    at_calls: dict[int, list[str]] = {}
    for training in interrupted:
        if (save := training.save_restored(1)) is not None:
            at_batches.setdefault(save.forwards, []).append(training.name)
        for stop in training.starts[0].noted("stop"):
            at_calls.setdefault(stop["calls"] + 1, []).append(training.name)
    return {"snapshots": at_batches, "snapshots_at_calls": at_calls}


def _moment(plan: dict[str, Any]) -> str:
    """Return when a training is to be disturbed, in words; empty: it is not."""
    if "stop_at" in plan:
        return f", requested{_after(plan['stop_at'], plan.get('stop_after_calls', 0) + 1)}"
    if "kill_at" in plan:
        return _after(plan["kill_at"], 0)
    return ""


def _after(step: int, calls: int) -> str:
    """Return a moment in words, before the first report by the calls of should_preempt()."""
    if step == BEFORE_ANY_REPORT:
        return f" at call {calls} of should_preempt()"
    return f" after step {step}"


def _unusable(undisturbed: Training) -> Finding | None:
    """Return why nothing can be compared."""
    text = describe_failure(undisturbed.starts)
    if not text and not undisturbed.runs:
        text = "the command never called core.init()"
    if not text and not undisturbed.rows:
        text = "the command reported no metrics"
    if not text:
        return None
    return Finding("command_failed", text, trainings=(UNDISTURBED,))


def _judge(
    undisturbed: Training,
    again: Training,
    interrupted: Sequence[Training],
    ended: Sequence[Training],
    rtol: float,
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
    observed: Training | None = again
    if difference or failure:  # values of a training that is not deterministic are not compared
        observed = None
    for training in interrupted:
        findings.append(diagnose(gather(training, undisturbed, observed, rtol=rtol, noise=noise)))
    merged = merge(findings)
    if not any(finding.cause in _FOLLOWED_BY_A_NEW_START for finding in merged):
        for training in ended:
            merged += _of_ended(undisturbed, training, observed is not None, rtol)
    return merged


def _remarks(undisturbed: Training, killed: Training, ended: Sequence[Training]) -> Iterator[str]:
    """Yield why equal trainings may prove less than they seem to."""
    if not ended:
        yield "after its end: not checked, since a master never starts a completed trial again"
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
    example = ": they have other rows"
    if difference.changed:
        example = f" ({difference.changed[0]})"
    return Finding(
        "undisturbed_runs_differ",
        f"two undisturbed trainings differ from step {step} on{example}; only counts were compared: set seeds, and "
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
