"""The state that a script reads while it is observed."""

from __future__ import annotations

import pytest

from det_core.check_resume._probe import ReadKeys


@pytest.mark.parametrize("view", ["keys", "values", "items"])
def test_read_keys_views_are_those_of_a_dictionary(view: str) -> None:
    read: list[str] = []
    state = ReadKeys({"model": 1, "step": 2}, read.append)
    assert type(getattr(state, view)()) is type(getattr({}, view)())
    assert list(getattr(state, view)()) == list(getattr({"model": 1, "step": 2}, view)())
    assert set(read) == {"model", "step"}


def test_read_keys_tells_only_of_those_that_are_read() -> None:
    read: list[str] = []
    state = ReadKeys({"model": 1, "step": 2, "loss": 3}, read.append)
    assert {"model"} & dict.keys(state) == {"model"}
    assert (state["model"], state.get("step"), state.get("none", 4)) == (1, 2, 4)
    assert read == ["model", "step", "none"]
