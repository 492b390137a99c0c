"""From facts to causes: a table, without any training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from det_core.check_resume._compare import Change, Difference
from det_core.check_resume._diagnosis import UNKNOWN, Facts, Finding, diagnose, merge

EXACT = Facts(
    "stopped", saved_step=10, reported_step=10, first_step=11, expected_step=11, beginning=1, end=30,
    batch=10, expected_batch=10,
)  # fmt: skip
"""A training that was stopped after step 10 of 30, and resumed exactly."""
CHANGED = Difference(changed=(Change("training", 11, "loss", 0.5, 0.6),))


def missing(*steps: int) -> Difference:
    """Return a difference by steps that were not reported."""
    return Difference(missing=tuple(("training", step) for step in steps))


def extra(*steps: int) -> Difference:
    """Return a difference by steps that only the resumed training has."""
    return Difference(extra=tuple(("training", step) for step in steps))


def test_training_that_is_equal_has_no_finding() -> None:
    assert diagnose(EXACT) == []


@pytest.mark.parametrize(("reported", "step"), [(8, 16), (-1, 8)])
def test_row_of_an_epoch_reported_after_a_stop_in_its_last_batch_is_no_repetition(reported: int, step: int) -> None:
    facts = replace(
        EXACT, saved_step=step, reported_step=reported, first_step=step, expected_step=step + 8, beginning=8, end=40
    )
    assert diagnose(facts) == []


def test_states_that_differ_without_effect_are_no_finding() -> None:
    """A script that needs no random numbers may leave their states alone; lr is set anew by some before each step."""
    facts = replace(EXACT, random=frozenset(["torch"]), parts=frozenset(["lr", "copy"]), objects=("Timer",))
    assert diagnose(facts) == []


@pytest.mark.parametrize(
    ("cause", "facts"),
    [
        ("command_failed", {"failure": "the command, resumed, ended with status 1: no"}),
        ("several_runs", {"runs": 2, "is_asked_for": False}),
        ("never_stopped", {"was_interrupted": False}),
        ("never_saved", {"has_checkpoint": False, "is_asked_for": False}),
        ("never_asked", {"is_asked_for": False, "first_step": 1, "difference": CHANGED}),
        ("starts_over", {"first_step": 1, "difference": CHANGED}),
        ("other_unit", {"saved_step": 1, "reported_step": 10, "is_other_unit": True, "difference": missing(2, 3, 10)}),
        ("step_repeated", {"first_step": 9}),
        ("step_repeated", {"reported_step": 11, "difference": CHANGED}),
        ("hole", {"reported_step": 9, "difference": missing(10)}),
        ("hole", {"difference": missing(17)}),
        ("step_jumped", {"first_step": 13, "difference": missing(11, 12)}),
        ("step_jumped", {"difference": missing(29, 30)}),
        ("data_position", {"difference": extra(31, 32)}),
        ("data_position", {"difference": replace(CHANGED, missing=(("training", 17),))}),
        ("data_position", {"difference": CHANGED, "batch": 3}),
        ("data_position", {"difference": CHANGED, "batch": 12}),
        ("data_position", {"difference": CHANGED, "batch": UNKNOWN, "has_loader": True}),
        ("values_differ", {"difference": CHANGED, "batch": UNKNOWN}),
        ("hole", {"difference": replace(CHANGED, missing=(("validation", 10),))}),
        ("hole", {"difference": replace(CHANGED, missing=(("validation", 10),)), "batch": UNKNOWN, "has_loader": True}),
        ("data_position", {"difference": CHANGED, "batch": UNKNOWN, "objects": ("MySampler",), "has_loader": True}),
        ("gradients_lost", {"difference": CHANGED, "batches_since_update": 2}),
        ("weights_not_loaded", {"difference": CHANGED, "parts": frozenset(["model", "optimizer"])}),
        ("optimizer_not_loaded", {"difference": CHANGED, "parts": frozenset(["optimizer", "lr"])}),
        ("scheduler_not_loaded", {"difference": CHANGED, "parts": frozenset(["scheduler", "lr"])}),
        ("scheduler_not_loaded", {"difference": CHANGED, "parts": frozenset(["lr"])}),
        ("scaler_not_loaded", {"parts": frozenset(["scaler"])}),
        ("ema_not_loaded", {"difference": CHANGED, "parts": frozenset(["copy"])}),
        ("ema_not_loaded", {"different_keys": ("state.pt: ema.weight", "state.pt: ema.bias")}),
        ("random_state_not_loaded", {"difference": CHANGED, "random": frozenset(["torch"]), "batch": 0}),
        (
            "random_state_not_loaded",
            {"difference": CHANGED, "random": frozenset(["torch"]), "is_random_loaded": True},
        ),
        ("random_state_of_other_rank", {"difference": CHANGED, "has_random_of_rank_0": True}),
        ("environment_state", {"difference": CHANGED, "objects": ("Bandit",)}),
        ("values_differ", {"difference": CHANGED}),
        ("values_differ", {"difference": Difference(is_reordered=True)}),
        ("hole", {"difference": Difference(missing=(("validation", 10),))}),
        ("hole", {"difference": Difference(extra=(("validation", 11),))}),
        ("checkpoint_differs", {"different_keys": ("state.pt: note",)}),
        ("ranks_differ", {"sizes": (2, 1)}),
        ("processes_left", {"left": ("sleep 60",)}),
    ],
)
def test_facts_give_their_cause_first(cause: str, facts: dict[str, Any]) -> None:
    findings = diagnose(replace(EXACT, **facts))
    assert findings[0].cause == cause
    assert findings[0].trainings == ("stopped",)


def test_epoch_trained_again_from_an_older_checkpoint_has_no_finding() -> None:
    """A script that saves at the end of an epoch alone, and leaves a stopped one, trains it again, with equal rows."""
    facts = replace(EXACT, saved_step=8, reported_step=8, first_step=9, expected_step=9)
    assert diagnose(facts) == []


def test_kill_before_the_first_checkpoint_has_no_finding() -> None:
    facts = replace(
        EXACT,
        name="killed",
        was_stopped=False,
        has_checkpoint=False,
        is_asked_for=False,
        saved_step=0,
        reported_step=0,
        first_step=1,
        expected_step=1,
    )
    assert diagnose(facts) == []


def test_text_says_what_the_checkpoint_holds_and_what_was_not_read() -> None:
    facts = replace(EXACT, difference=CHANGED, parts=frozenset(["optimizer"]))
    [lacks] = diagnose(facts)
    [holds] = diagnose(replace(facts, held={"optimizer": "optimizer"}))
    [unread] = diagnose(replace(facts, held={"optimizer": "optimizer"}, unread=("optimizer",)))
    assert "the checkpoint has no optimizer" in lacks.text
    assert "the checkpoint has it as 'optimizer' (" in holds.text
    assert "as 'optimizer', which the script never reads (training step 11: loss 0.6 instead of 0.5)" in unread.text


def test_findings_of_several_trainings_merge_by_cause() -> None:
    jumped, other = Finding("step_jumped", "1", 5, ("stopped",)), Finding("values_differ", "2", 6, ("stopped",))
    position = Finding("data_position", "3", 6, ("stopped",))
    merged = merge([[position, jumped], [replace(jumped, trainings=("killed",)), other]])
    assert [(finding.cause, finding.trainings) for finding in merged] == [
        ("data_position", ("stopped",)),
        ("step_jumped", ("stopped", "killed")),
    ]
