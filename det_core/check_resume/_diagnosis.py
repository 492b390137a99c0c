"""Diagnosis: from what differs after a resume to its likeliest causes, as a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from det_core.check_resume._compare import Difference

UNKNOWN = -1
"""Place of a batch that the undisturbed training does not have."""

NO_BETTER_CAUSE = "values_differ"


@dataclass(frozen=True)
class Finding:
    """A reason why a training does not resume exactly.

    Attributes:
        cause: a stable name.
        text: what is wrong, and what to do.
        step: the step at which it shows first; None: at none.
        trainings: the trainings in which it shows.
    """

    cause: str
    text: str
    step: int | None = None
    trainings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A training that was stopped or killed and resumed, beside the undisturbed one.

    Attributes:
        name: the training.
        failure: how a start of the command failed; empty: none did.
        runs: the runs in its home.
        sizes: the numbers of ranks of its starts.
        left: commands of processes that outlived their start.
        was_interrupted: whether it was stopped or killed at all.
        was_stopped: whether it was stopped.
        has_checkpoint: whether a checkpoint was committed before that.
        is_asked_for: whether the resumed start has restored a checkpoint.
        group: the group of metrics that steps are about.
        saved_step: ``steps_completed`` of the restored checkpoint.
        reported_step: the largest step that had been reported when it was saved.
        first_step: the first step of the resumed start; None: it reported none.
        expected_step: the step that follows the saved one in the undisturbed training; None: there is none.
        beginning: the first step of the undisturbed training.
        end: its last step.
        is_other_unit: whether all checkpoints of the undisturbed training have fewer steps than were reported.
        difference: how the rows differ; without values where those of the undisturbed trainings differ.
        parts: parts of the state that differ at the first batch after the resume.
        random: random number generators whose states differ then.
        is_random_loaded: whether the resumed start has set the state of a generator.
        has_random_of_rank_0: whether other ranks then have the state of rank 0.
        batch: place of the first batch after the resume, :data:`UNKNOWN`, or None: nothing is known.
        expected_batch: its place in the undisturbed training.
        objects: classes of the script, or of environments, whose objects differ then.
        has_loader: whether there is a DataLoader.
        batches_since_update: batches since the last step of the optimizer at the stop, where a step takes several.
        held: kinds of state that the restored checkpoint holds, with the key of each.
        unread: keys of it that the resumed start has not read.
        different_keys: what differs in the final checkpoint.
    """

    name: str
    failure: str = ""
    runs: int = 1
    sizes: tuple[int, ...] = (1, 1)
    left: tuple[str, ...] = ()
    was_interrupted: bool = True
    was_stopped: bool = True
    has_checkpoint: bool = True
    is_asked_for: bool = True
    group: str = "training"
    saved_step: int = 0
    reported_step: int = 0
    first_step: int | None = None
    expected_step: int | None = None
    beginning: int = 1
    end: int = 0
    is_other_unit: bool = False
    difference: Difference = field(default_factory=Difference)
    parts: frozenset[str] = frozenset()
    random: frozenset[str] = frozenset()
    is_random_loaded: bool = False
    has_random_of_rank_0: bool = False
    batch: int | None = None
    expected_batch: int | None = None
    objects: tuple[str, ...] = ()
    has_loader: bool = False
    batches_since_update: int = 0
    held: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    different_keys: tuple[str, ...] = ()


def diagnose(facts: Facts) -> list[Finding]:
    """Return what is wrong with a resumed training, the likeliest cause first; empty if nothing is."""
    blocking = next(_blocking(facts), None)
    if blocking is not None:
        findings = [blocking]
    else:
        findings = [*_steps(facts), *_values(facts)]
    if not findings and facts.difference:
        findings.append(_of_other_rows(facts.difference))
    if not findings and facts.different_keys:
        findings.append(_of_checkpoint(facts))
    findings += _around(facts)
    return [replace(finding, trainings=(facts.name,)) for finding in findings]


def merge(findings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of several trainings, each cause once, the likeliest first."""
    places: dict[str, int] = {}
    merged: dict[str, Finding] = {}
    for of_training in findings:
        for place, finding in enumerate(of_training):
            known = merged.get(finding.cause)
            places[finding.cause] = min(place, places.get(finding.cause, place))
            if known is None:
                merged[finding.cause] = finding
            else:
                merged[finding.cause] = replace(known, trainings=known.trainings + finding.trainings)
    if len(merged) > 1:
        merged.pop(NO_BETTER_CAUSE, None)
    return sorted(merged.values(), key=lambda finding: places[finding.cause])


def _blocking(facts: Facts) -> Iterator[Finding]:
    """Yield what makes all else follow."""
    if facts.failure:
        yield Finding("command_failed", facts.failure)
    if facts.runs > 1:
        yield Finding(
            "several_runs",
            f"{facts.runs} runs instead of one: resume='latest' goes by the name, which was another at the second "
            "start; use a name without a time or a random number in core.init(name=)",
        )
    if not facts.was_interrupted:
        yield Finding(
            "never_stopped",
            "the script was asked to stop, and trained to its end: call ctx.preempt.should_preempt() in the loop, save "
            "and leave it when it returns True; `--kill` checks a kill alone",
        )
    if not facts.has_checkpoint:
        if facts.was_stopped:
            yield Finding(
                "never_saved",
                "nothing was saved when the script was asked to stop: save when should_preempt() returns True",
            )
        return
    if not facts.is_asked_for:
        yield Finding(
            "never_asked",
            f"the script never asked for its checkpoint, and began at step {facts.first_step}: enter `with "
            "ctx.checkpoint.resume() as path:` after core.init(), and load what is there",
            facts.first_step,
        )
    if facts.is_other_unit and facts.difference.missing_of(facts.group):
        missing = facts.difference.missing_of(facts.group)
        yield Finding(
            "other_unit",
            f"steps_completed is {facts.saved_step} in the checkpoint, where step {facts.reported_step} had been "
            f"reported: another unit. {len(missing)} rows are lost: use one unit for reports, steps_completed and "
            "lengths",
            missing[0],
        )
    if facts.first_step == facts.beginning != facts.expected_step and facts.first_step <= facts.reported_step:
        yield Finding(
            "starts_over",
            f"the training began at step {facts.first_step} again instead of {facts.expected_step}: set the counter to "
            "ctx.steps_completed",
            facts.first_step,
        )


def _steps(facts: Facts) -> Iterator[Finding]:
    """Yield what the steps say."""
    group = facts.group
    first = facts.first_step
    expected = facts.expected_step
    missing = facts.difference.missing_of(group)
    extra = facts.difference.extra_of(group)
    is_changed = bool(facts.difference.changed) or bool(extra)
    # A row of a whole epoch is reported after a checkpoint of its last batch, for the first time.
    if first is not None and first <= min(facts.saved_step, facts.reported_step):
        yield Finding(
            "step_repeated",
            f"step {first} was trained again, though the checkpoint has {facts.saved_step}: begin at "
            "ctx.steps_completed",
            first,
        )
    elif facts.reported_step > facts.saved_step and is_changed and not facts.is_other_unit:
        yield Finding(
            "step_repeated",
            f"step {facts.reported_step} had been reported when a checkpoint of step {facts.saved_step} was saved, and "
            "was trained twice: count the step before the save",
            facts.saved_step + 1,
        )
    unreported = [step for step in missing if facts.reported_step < step <= facts.saved_step]
    if unreported:
        yield Finding(
            "hole",
            f"step {unreported[0]} is in the checkpoint, but was never reported: report before the loop is left",
            unreported[0],
        )
    missing = [step for step in missing if step not in unreported]
    if first is not None and expected is not None and first > expected:
        yield Finding(
            "step_jumped",
            f"the first step after the resume is {first} instead of {expected}: the rest of an epoch was not trained",
            expected,
        )
        missing = [step for step in missing if step > first]
    if missing and missing[-1] == facts.end:
        yield Finding(
            "step_jumped",
            f"the training ended {len(missing)} rows early, at step {missing[0]}: the rest of the epoch in which it "
            "was interrupted was not trained",
            missing[0],
        )
    elif missing and first is not None and _differs_at(facts, first):
        yield Finding(
            "data_position",
            f"{len(missing)} steps are missing, the first is {missing[0]}: batches were skipped that had not been "
            "trained; core.resumable(loader) restores the position",
            missing[0],
        )
    elif missing:
        yield Finding("hole", f"{len(missing)} steps were not reported, the first is {missing[0]}", missing[0])
    if extra and extra[-1] > facts.end:
        yield Finding(
            "data_position",
            f"the training went on for {len(extra)} rows more, to step {extra[-1]}: after the resume the batches of "
            f"the epoch that had been trained were not skipped",
            extra[0],
        )
    lost = [(other, step) for other, step in facts.difference.missing if other != group]
    if lost and not facts.difference.missing_of(group):
        other, step = lost[0]
        yield Finding(
            "hole",
            f"{len(lost)} rows of group {other} are missing, the first at step {step}: what follows the loop over the "
            "batches, such as validation, was left out after a checkpoint of its last batch",
            step,
        )


def _differs_at(facts: Facts, step: int) -> bool:
    return any(change.step == step for change in facts.difference.changed)


def _values(facts: Facts) -> Iterator[Finding]:
    """Yield what values and states say."""
    changed = facts.difference.changed
    if not changed and "scaler" not in facts.parts and not facts.different_keys:
        return
    step = None
    example = ""
    if changed:
        step = changed[0].step
        example = f" ({changed[0]})"
    causes = list(_state_causes(facts))
    for number, finding in enumerate(causes):
        if number == 0:  # once, as all causes have the same example
            finding = replace(finding, text=finding.text + example)
        yield replace(finding, step=step)
    if changed and not causes:
        yield Finding(
            NO_BETTER_CAUSE,
            f"values differ from step {step} on{example}: look for what the first step after the resume reads and the "
            "checkpoint lacks, such as a hidden state or a running sum that one batch hands to the next",
            step,
        )


def _state_causes(facts: Facts) -> Iterator[Finding]:
    if facts.batches_since_update:
        yield Finding(
            "gradients_lost",
            f"it was stopped {facts.batches_since_update} batches into an accumulation, whose gradients are in no "
            "checkpoint: ask should_preempt() after the step of the optimizer alone",
        )
    if "model" in facts.parts or "module" in facts.parts:
        yield Finding("weights_not_loaded", f"the weights are not those that were saved: {_where(facts, 'model')}")
    if "optimizer" in facts.parts:
        yield Finding(
            "optimizer_not_loaded", f"the optimizer's state is not the one that was saved: {_where(facts, 'optimizer')}"
        )
    if "scheduler" in facts.parts or ("lr" in facts.parts and "optimizer" not in facts.parts):
        yield Finding(
            "scheduler_not_loaded", f"the learning rate's schedule is not where it was: {_where(facts, 'scheduler')}"
        )
    if "scaler" in facts.parts:
        yield Finding("scaler_not_loaded", f"the gradient scaler is not as it was: {_where(facts, 'scaler')}")
    if "copy" in facts.parts:
        yield Finding(
            "ema_not_loaded",
            f"a second copy of the model (an EMA, a target network) is not as it was: {_where(facts, 'copy')}",
        )
    yield from _random_and_data(facts)


def _random_and_data(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong with random states and batches, which depend on each other."""
    is_misplaced = facts.batch is not None and facts.batch != facts.expected_batch
    is_known = is_misplaced and facts.batch != UNKNOWN
    is_forgotten = bool(facts.random) and not facts.is_random_loaded
    if facts.has_random_of_rank_0:
        yield Finding(
            "random_state_of_other_rank",
            "all ranks have the random state of rank 0: save one for each rank, save(per_rank={'random': "
            "core.random_state()})",
        )
        return
    if is_forgotten:
        yield Finding(
            "random_state_not_loaded",
            f"random numbers ({', '.join(sorted(facts.random))}) go on elsewhere: {_where(facts, 'random')}; call "
            "core.set_random_state() as the last thing that is loaded",
        )
    # Without its random state a training may begin at its first batch again, skipped or not.
    if is_known and not (is_forgotten and facts.batch == 0):
        yield _misplaced(facts)
    elif facts.objects and not is_forgotten and not (is_misplaced and facts.has_loader):
        yield Finding(
            "environment_state",
            f"objects of {', '.join(facts.objects)} are not as they were: save and load the state of environments, or "
            "end episodes before a checkpoint",
        )
    elif is_misplaced and not is_forgotten and facts.has_loader:
        yield Finding(
            "data_position",
            "the first batch after the resume is none of the undisturbed training: a sampler has drawn a new order, or "
            "random numbers were drawn since their state was loaded; core.resumable(loader) restores the position",
        )
    elif facts.random and facts.is_random_loaded:
        yield Finding(
            "random_state_not_loaded",
            f"random states were loaded, and drawn from before the first step ({', '.join(sorted(facts.random))}): "
            "load them last, core.set_random_state()",
        )


def _misplaced(facts: Facts) -> Finding:
    assert facts.batch is not None and facts.expected_batch is not None
    distance = facts.batch - facts.expected_batch
    if distance < 0:
        why = "done batches of the epoch were not skipped"
    else:
        why = "batches were skipped twice, or drawn ahead and counted as trained"
    return Finding(
        "data_position",
        f"the first batch after the resume is number {facts.batch + 1} of the training instead of "
        f"{facts.expected_batch + 1}: {why}; core.resumable(loader) restores the position",
    )


_KIND_WORDS = {"model": "weights", "copy": "a second copy of the weights", "random": "random states"}


def _where(facts: Facts, kind: str) -> str:
    """Return whether the checkpoint holds a kind of state, in words."""
    word = _KIND_WORDS.get(kind, kind)
    key = facts.held.get(kind)
    if key is None:
        return f"the checkpoint has no {word}"
    if key.split(".")[0] in facts.unread:
        return f"the checkpoint has it as {key!r}, which the script never reads"
    return f"the checkpoint has it as {key!r}"


def _of_other_rows(difference: Difference) -> Finding:
    """Return what is wrong with rows where steps and values of the main group are right."""
    for places, how in ((difference.missing, "is missing"), (difference.extra, "is not in the undisturbed training")):
        if places:
            group, step = places[0]
            return Finding("hole", f"the row of group {group} at step {step} {how}, of {len(places)}", step)
    return Finding(NO_BETTER_CAUSE, "all rows are equal, but were reported in another order")


_BY_KEY = {
    "ema": "ema_not_loaded", "averag": "ema_not_loaded", "shadow": "ema_not_loaded", "scaler": "scaler_not_loaded",
    "sched": "scheduler_not_loaded",
}  # fmt: skip
"""Cause by a part of a checkpoint's key."""


def _of_checkpoint(facts: Facts) -> Finding:
    keys = facts.different_keys
    shown = ", ".join(keys[:3])
    if len(keys) > 3:
        shown += f" and {len(keys) - 3} more"
    for part, cause in _BY_KEY.items():
        if all(part in key.rpartition(": ")[2].lower() for key in keys):
            return Finding(cause, f"all rows are equal, but the final checkpoint differs in {shown}")
    return Finding("checkpoint_differs", f"all rows are equal, but the final checkpoint differs in {shown}")


def _around(facts: Facts) -> Iterator[Finding]:
    """Yield what is wrong beside the training itself."""
    if len(set(facts.sizes)) > 1:
        yield Finding("ranks_differ", f"its starts had {', '.join(map(str, facts.sizes))} ranks")
    if facts.left:
        yield Finding("processes_left", f"{len(facts.left)} processes outlived the command, such as: {facts.left[0]}")
