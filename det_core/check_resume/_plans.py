"""Plans: at which moment a training is stopped or killed, chosen from the undisturbed one."""

from __future__ import annotations

from typing import Any

from det_core.check_resume._records import Save, Training

PART = 0.4
"""Part of a training after which it is disturbed; a third is the end of an epoch where there are three."""
BEFORE_ANY_REPORT = -1
"""``stop_at`` of a plan that counts calls from the start."""


def stop_plan(undisturbed: Training, at: int | None) -> dict[str, Any]:
    """Return the plan of a stop.

    Args:
        undisturbed: the training to disturb.
        at: the step to stop after. Defaults to None: after two fifths, apart from ends of epochs and checkpoints, and
            in the middle between two reports, where calls of ``should_preempt()`` allow it. A training that reports
            once, at its end, is stopped after two fifths of its calls.

    Raises:
        ValueError: If the training reports no such step before its last.
    """
    steps = undisturbed.steps(undisturbed.main_group)
    if at is not None:
        return {"stop_at": _checked(at, steps)}
    if len(steps) == 1:
        return _request(undisturbed, steps, -1, round(PART * _calls_per_row(undisturbed, steps)))
    special = {save.reported for save in undisturbed.saves} | _ends(undisturbed)
    target = round(PART * (len(steps) - 1))
    # Away from ends of epochs and checkpoints: a script that forgets its position in an epoch would pass a stop there.
    window = range(len(steps) // 4, max(len(steps) * 3 // 5, 1))
    plain = [number for number in window if steps[number] not in special] or [target]
    number = min(plain, key=lambda number: abs(number - target))
    return _request(undisturbed, steps, number, _calls_per_row(undisturbed, steps) // 2)


def end_plan(undisturbed: Training) -> dict[str, Any] | None:
    """Return the plan of a stop in the last batch of an epoch, the one nearest to two fifths.

    It shows whether a resume runs the code after the batches of an epoch, such as a validation or a step of the
    schedule, and begins the next epoch with its first batch. A stop within an epoch, or a checkpoint after one, does
    not.

    Returns:
        The plan; None if the record shows no end of an epoch before that of the training, or cannot tell one from
        the other rows.
    """
    steps = undisturbed.steps(undisturbed.main_group)
    ends = sorted(step for step in _ends(undisturbed) if steps[0] <= step < steps[-1])
    if not ends:
        return None
    calls = _calls_per_row(undisturbed, steps)
    target = steps[round(PART * (len(steps) - 1))]
    end = min(ends, key=lambda step: abs(step - target))
    if len(ends) < len(steps) - 1:
        row = sum(step <= end for step in steps) - 1
        after = calls * (end - steps[row]) // (steps[row + 1] - steps[row])
    elif calls > 1:  # one row for each epoch, reported when its last call has been
        row = sum(step < end for step in steps) - 1
        after = calls - 1
    else:
        return None
    return _request(undisturbed, steps, row, after)


def _request(undisturbed: Training, steps: list[int], row: int, after: int) -> dict[str, Any]:
    """Return the plan of a stop at a call after the report of a row, or after the start for row -1.

    Several ranks stop at the call after the request, so the request is made one call earlier.
    """
    if max(undisturbed.sizes, default=1) > 1:
        after -= 1
    if after < 0 <= row:
        row -= 1
        after += _calls_per_row(undisturbed, steps)
    stop_at = BEFORE_ANY_REPORT
    if row >= 0:
        stop_at = steps[row]
    return {"stop_at": stop_at, "stop_after_calls": max(after, 0)}


def _ends(undisturbed: Training) -> set[int]:
    """Return the steps after which an epoch ended, or something else than a training batch followed.

    They are those of rows of other groups, such as validations, and those after which a DataLoader was begun anew.
    """
    others = [rows for group, rows in undisturbed.rows.items() if group != undisturbed.main_group]
    passes = [note["step"] for start in undisturbed.starts for note in start.noted("pass")]
    return {step for rows in others for step in rows} | set(passes)


def kill_plan(undisturbed: Training, at: int | None) -> dict[str, Any]:
    """Return the plan of a kill.

    Args:
        undisturbed: the training to disturb.
        at: the step after whose report it is killed. Defaults to None: the middle between two checkpoints, after about
            two fifths.

    Raises:
        ValueError: If the training reports no such step before its last.
    """
    steps = undisturbed.steps(undisturbed.main_group)
    if at is not None:
        return {"kill_at": _checked(at, steps)}
    target = steps[round(PART * (len(steps) - 1))]
    middles = [
        middle
        for before, after in zip(undisturbed.saves, undisturbed.saves[1:], strict=False)
        if (middle := _middle(steps, before, after)) is not None
    ]
    # Between two checkpoints, so that the resume has to train rows again.
    return {"kill_at": min(middles, key=lambda step: abs(step - target), default=target)}


def _checked(at: int, steps: list[int]) -> int:
    if not steps[0] <= at < steps[-1]:
        raise ValueError(
            f"--at {at}: expected at least {steps[0]} and less than {steps[-1]}, the steps of this training"
        )
    return at


def _calls_per_row(undisturbed: Training, steps: list[int]) -> int:
    """Return how often should_preempt() is called from one report to the next."""
    if not undisturbed.saves:
        return 1
    last = undisturbed.saves[-1]
    rows = sum(step <= last.reported for step in steps)
    if not rows:
        return 1
    return last.calls // rows


def _middle(steps: list[int], before: Save, after: Save) -> int | None:
    """Return the step in the middle of those reported between two checkpoints; None if there are none."""
    between = [step for step in steps if before.reported < step <= after.reported]
    if not between:
        return None
    return between[(len(between) - 1) // 2]
