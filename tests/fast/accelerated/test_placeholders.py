"""Placeholders in partials: what they come to, and what is left alone."""

from __future__ import annotations

import operator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from det_core.accelerated._placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values

P = TrainerPlaceholderValues
NUMBERS = {
    P.NUM_EPOCHS: 3,
    P.NUM_UPDATE_STEPS_PER_EPOCH: 20,
    P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH: 10,
    P.TRAIN_DATALOADER_LEN: 40,
    P.EVAL_DATALOADER_LEN: 7,
}


class NoLength:
    def __len__(self) -> int:
        raise TypeError("object of type 'Stream' has no len()")


def a_trainer(**changes: Any) -> SimpleNamespace:
    config = {
        "num_epochs": 3, "num_update_steps_per_epoch": 20, "num_local_update_steps_per_epoch": 10, "num_processes": 2,
        "max_num_train_steps": None,
    }  # fmt: skip
    loaders = {"_train_dataloader": range(40), "_eval_dataloader": range(7)}
    config |= {name: value for name, value in changes.items() if name in config}
    loaders |= {name: value for name, value in changes.items() if name in loaders}
    return SimpleNamespace(run_config=SimpleNamespace(**config), **loaders)


def replaced(*args: Any, trainer: Any = None, **keywords: Any) -> partial[Any]:
    found: partial[Any] = replace_trainer_placeholder_values(trainer or a_trainer(), partial(dict, *args, **keywords))
    return found


def test_case_15_every_placeholder_and_arithmetic_with_it() -> None:
    stranger = SimpleNamespace(name="NUM_EPOCHS", value="NUM_EPOCHS")
    found = replaced(
        **{member.name: member for member in P},
        twice=P.NUM_EPOCHS * 2,
        more=P.NUM_EPOCHS + 2,
        twice_the_other_way=2 * P.NUM_EPOCHS,
        chained=P.NUM_EPOCHS * 2 + 1,
        less=P.NUM_EPOCHS - 1,
        stranger=stranger,
    )
    numbers = {member.name: number for member, number in NUMBERS.items()}
    more = {"twice": 6, "more": 5, "twice_the_other_way": 6, "chained": 7, "less": 2, "stranger": stranger}
    assert found.keywords == {**numbers, **more}
    assert all(type(found.keywords[name]) is int for name in found.keywords if name != "stranger")
    assert found.keywords["stranger"] is stranger


def test_precedence_and_order_are_pythons() -> None:
    epochs, steps = P.NUM_EPOCHS, P.NUM_UPDATE_STEPS_PER_EPOCH
    values = [2 + epochs * 4, (2 + epochs) * 4, 10 - epochs - 1, 10 - (epochs - 1), 100 // steps // 2, steps * epochs]
    assert replaced(*values).args == (14, 20, 6, 8, 2, 60)


def test_whole_results_are_ints_and_others_floats() -> None:
    found = replaced(P.NUM_UPDATE_STEPS_PER_EPOCH / 2, P.NUM_UPDATE_STEPS_PER_EPOCH * 0.1, P.NUM_EPOCHS / 2).args
    assert found == (10, 2, 1.5)
    assert [type(value) for value in found] == [int, int, float]


Tree = st.recursive(
    st.sampled_from(list(P)) | st.integers(-9, 9) | st.floats(-9, 9),
    lambda inner: st.tuples(
        st.sampled_from([operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv]), inner, inner
    ),
    max_leaves=6,
)


def worked_out(tree: Any, leaf: Any) -> Any:
    if isinstance(tree, tuple):
        function, left, right = tree
        return function(worked_out(left, leaf), worked_out(right, leaf))
    return leaf(tree)


@given(Tree)
def test_as_plain_arithmetic(tree: Any) -> None:
    try:
        plain = worked_out(tree, lambda leaf: NUMBERS[leaf] if isinstance(leaf, P) else leaf)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            replaced(worked_out(tree, lambda leaf: leaf))
        return
    (found,) = replaced(worked_out(tree, lambda leaf: leaf)).args
    assert found == plain


def test_positional_arguments_lists_and_partials_in_partials() -> None:
    inner = partial(max, P.NUM_EPOCHS, 1)
    found = replaced(P.NUM_EPOCHS, inner=inner, milestones=[P.NUM_EPOCHS * 30, 100], pair=(1, P.NUM_EPOCHS))
    assert found.args == (3,)
    assert found.keywords["inner"]() == 3 and found.keywords["milestones"] == [90, 100]
    assert found.keywords["pair"] == (1, 3)
    assert inner.args == (P.NUM_EPOCHS, 1), "a new partial, and the old one as it was"


def test_anything_else_is_unchanged() -> None:
    trainer = a_trainer()
    plain = [1, 2]
    assert replaced(plain=plain).keywords["plain"] is plain
    for other in (len, P.NUM_EPOCHS, [P.NUM_EPOCHS], "NUM_EPOCHS", None):
        assert replace_trainer_placeholder_values(trainer, other) is other


def test_what_is_no_number_is_refused() -> None:
    for function in (lambda: P.NUM_EPOCHS * "a", lambda: "a" * P.NUM_EPOCHS, lambda: P.NUM_EPOCHS - None):
        with pytest.raises(TypeError):
            function()


def test_the_names() -> None:
    assert P.placeholder_set() == {
        "NUM_EPOCHS", "NUM_UPDATE_STEPS_PER_EPOCH", "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH", "TRAIN_DATALOADER_LEN",
        "EVAL_DATALOADER_LEN",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("placeholder", "trainer", "way_out"),
    [
        (P.NUM_UPDATE_STEPS_PER_EPOCH, {"num_update_steps_per_epoch": None}, "max_num_train_steps"),
        (P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH, {"num_local_update_steps_per_epoch": None}, "max_num_train_steps"),
        (P.TRAIN_DATALOADER_LEN, {"_train_dataloader": NoLength()}, "no length; pass the number instead"),
        (P.TRAIN_DATALOADER_LEN, {"_train_dataloader": iter([])}, "no length; pass the number instead"),
        (P.EVAL_DATALOADER_LEN, {"_eval_dataloader": None}, "no evaluation dataset"),
    ],
)
def test_a_length_that_nobody_knows(placeholder: P, trainer: dict[str, Any], way_out: str) -> None:
    without = a_trainer(**trainer)
    with pytest.raises(ValueError, match=rf"placeholder {placeholder.name} .*{way_out}"):
        replaced(steps=placeholder * 2, trainer=without)
    assert replaced(steps=P.NUM_EPOCHS, trainer=without).keywords == {"steps": 3}, "only what is used must be known"


def test_the_epochs_share_the_updates_of_a_limited_run() -> None:
    trainer = a_trainer(num_update_steps_per_epoch=None, num_local_update_steps_per_epoch=None, max_num_train_steps=100)
    found = replaced(P.NUM_UPDATE_STEPS_PER_EPOCH, P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH, trainer=trainer).args
    assert found == (34, 17), "100 updates in 3 epochs, on 2 processes"
