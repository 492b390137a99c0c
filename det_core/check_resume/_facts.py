"""Facts about a resumed training, gathered from what was read of it and of the undisturbed ones."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from det_core.check_resume._compare import compare
from det_core.check_resume._diagnosis import UNKNOWN, Facts
from det_core.check_resume._records import Save, Training
from det_core.check_resume._states import different_keys, held_kinds, top_keys
from det_core.check_resume._trainings import Start

RESUMED = "resumed"
"""Name of the snapshot before the first batch of a resumed start."""


def gather(
    training: Training,
    expected: Training,
    again: Training | None,
    *,
    rtol: float = 0.0,
    noise: Set[str] = frozenset(),
) -> Facts:
    """Return the facts about a training that was stopped or killed, and resumed.

    Args:
        training: the training.
        expected: the undisturbed one.
        again: the undisturbed one that was observed; None: it differs from ``expected``, so values mean nothing.
        rtol: relative tolerance of numbers.
        noise: keys of final checkpoints that differ between undisturbed trainings.
    """
    group = expected.main_group
    steps = expected.steps(group)
    saves = [save for save in training.saves if save.restart == 0]
    restored = training.save_restored(1)
    start = restored or next(reversed(saves), None)
    saved_step = 0
    reported_step = 0
    if start is not None:
        saved_step = start.steps_completed
        reported_step = start.reported
    difference = compare(expected, training, rtol=rtol)
    if again is None:
        difference = replace(difference, changed=())
    facts = Facts(
        name=training.name,
        failure=describe_failure(training.starts),
        runs=training.runs,
        sizes=training.sizes,
        left=tuple(command for one in training.starts for command in one.left),
        was_interrupted=training.starts[0].is_killed or bool(training.starts[0].noted("stop")),
        was_stopped=bool(training.starts[0].noted("stop")),
        has_checkpoint=start is not None,
        is_asked_for=restored is not None,
        group=group,
        saved_step=saved_step,
        reported_step=reported_step,
        first_step=next((step for name, step in training.reported.get(1, ()) if name == group), None),
        expected_step=next((step for step in steps if step > saved_step), None),
        beginning=next(iter(steps), 1),
        end=next(reversed(steps), 0),
        is_other_unit=_is_other_unit(expected, steps),
        difference=difference,
    )
    if again is None or restored is None or len(training.starts) < 2 or facts.failure:
        return facts
    return _with_states(facts, training, expected, again, restored, rtol=rtol, noise=noise)


def describe_failure(starts: tuple[Start, ...]) -> str:
    """Return how a start of the command failed, in words; empty: none did."""
    for number, start in enumerate(starts):
        which = "the command"
        if number > 0:
            which = "the command, resumed,"
        if start.is_hung:
            return f"{which} did not end within {start.seconds:.0f} s"
        if start.status and not start.is_killed:
            return f"{which} ended with status {start.status}: {_last_line(start.output)}"
    return ""


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("det_core: ")]
    if not lines:
        return "it printed nothing"
    return lines[-1][:300]


def _is_other_unit(expected: Training, steps: list[int]) -> bool:
    """Return whether every checkpoint has fewer steps than were reported, and one has fewer by several rows."""
    gaps = [sum(save.steps_completed < step <= save.reported for step in steps) for save in expected.saves]
    return bool(gaps) and min(gaps) > 0 and max(gaps) > 1


def _with_states(
    facts: Facts,
    training: Training,
    expected: Training,
    again: Training,
    restored: Save,
    *,
    rtol: float,
    noise: Set[str],
) -> Facts:
    """Add what states and batches say."""
    observed = again.starts[0]
    resumed = training.starts[1]
    pairs = _snapshots(observed, resumed, training.name)
    seeded = _seeded(observed, training.starts[0])
    parts = {name for before, after in pairs for name in _differing(before["parts"], after["parts"])}
    random = {name for before, after in pairs for name in _differing(before["random"], after["random"])} & seeded
    objects = {name for before, after in pairs for name in _differing(before["objects"], after["objects"])}
    of_rank_0: dict[str, str] = {}
    if pairs:
        of_rank_0 = pairs[0][1]["random"]
    others = [after["random"] for before, after in pairs[1:] if before["random"] != after["random"]]
    batch, expected_batch = _batches(observed, resumed, restored)
    stops = training.starts[0].noted("stop")
    unread: list[str] = []
    held: dict[str, str] = {}
    if facts.difference or parts:  # otherwise torch need not be loaded to read the checkpoint
        held = held_kinds(restored.path)
        read = {note["key"] for note in resumed.noted("read")}
        if read:
            unread = [key for key in top_keys(restored.path) if key not in read]
    different: list[str] = []
    if expected.saves and training.saves:
        different = different_keys(expected.saves[-1].path, training.saves[-1].path, rtol)
    return replace(
        facts,
        parts=frozenset(parts),
        random=frozenset(random),
        is_random_loaded=any(note["kind"] == "random" for note in resumed.noted("load")),
        has_random_of_rank_0=any(states[name] == of_rank_0[name] for states in others for name in random),
        batch=batch,
        expected_batch=expected_batch,
        objects=tuple(sorted(objects)),
        has_loader=any(after["has_loader"] for _, after in pairs),
        batches_since_update=_since_update(stops[0]) if stops else 0,
        held=held,
        unread=tuple(unread),
        different_keys=tuple(key for key in different if key not in noise),
    )


def _snapshots(observed: Start, resumed: Start, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what each rank had in the undisturbed training and has after the resume.

    That is before the first batch, or, where no module of torch is trained, at the first call of should_preempt().
    """
    for event in ("snapshot", "snapshot_at_call"):
        pairs = [
            (before[-1], after[-1])
            for rank in sorted(resumed.notes)
            if (before := [note for note in observed.noted(event, rank) if note["name"] == name])
            and (after := [note for note in resumed.noted(event, rank) if note["name"] == RESUMED])
        ]
        if pairs:
            return pairs
    return []


def _seeded(one: Start, other: Start) -> set[str]:
    """Return the random number generators that start in the same state whenever the command is started."""
    states = [start.noted("start")[0]["random"] for start in (one, other)]
    return {name for name in states[0] if states[0][name] == states[1].get(name)}


def _differing(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}


def _since_update(stop: dict[str, Any]) -> int:
    if stop["forwards"] >= 2 * stop["updates"] > 0:  # gradients are accumulated
        return int(stop["since_update"])
    return 0


def _batches(observed: Start, resumed: Start, restored: Save) -> tuple[int | None, int | None]:
    """Return the place in the undisturbed training of the first batch after the resume, and the expected one."""
    digests = [note["digest"] for note in observed.noted("batch")]
    first = [note["digest"] for note in resumed.noted("batch") if note["number"] == 0]
    place = restored.forwards
    if not first or place >= len(digests) or len(set(digests)) <= len(digests) // 2:
        return None, None
    if digests[place] == first[-1]:
        return place, place
    places = [number for number, digest in enumerate(digests) if digest == first[-1]]
    return min(places, key=lambda number: abs(number - place), default=UNKNOWN), place
