"""States of which a checkpoint can hold only parts."""

from __future__ import annotations

import io
import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import pytest

torch = pytest.importorskip("torch")

from det_core._training.states import completed, without_unreadable  # noqa: E402

logger = logging.getLogger("test")


def load(file: IO[bytes]) -> Any:
    return torch.load(file, weights_only=True)


def readable(state: dict[str, Any], warned: set[str] | None = None) -> dict[str, Any]:
    return without_unreadable(state, load, logger, set() if warned is None else warned)


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return load(file)


@pytest.mark.parametrize(
    "part", [lambda: 0, (i for i in ()), threading.Lock(), Path("here")], ids=lambda part: type(part).__name__
)
def test_completed_takes_unreadable_parts_from_current_state_at_any_depth(part: Any) -> None:
    saved = {"one": {"last": 3, "held": part}, "several": [{"n": [1, (2, part)]}, {"n": 4}]}
    current = {"one": {"last": 0, "held": "new"}, "several": [{"n": [0, (0, "newer")]}, {"n": 0}]}
    again = completed(through_file(readable(saved)), lambda: current)
    assert again == {"one": {"last": 3, "held": "new"}, "several": [{"n": [1, (2, "newer")]}, {"n": 4}]}


def test_completed_drops_unreadable_parts_that_current_state_lacks() -> None:
    saved = {"one": {"last": 3, "held": print}, "several": [print, 1], "keys": {Path("k"): 1}, "none": None}
    again = completed(through_file(readable(saved)), lambda: {"several": []})
    assert again == {"one": {"last": 3}, "several": [None, 1], "none": None}


def test_readable_states_are_passed_on_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    state = model.state_dict()
    kept = readable({"model": state, "held": print})
    assert kept["model"] is state
    current: list[Any] = []
    assert completed({"model": state}, lambda: current.append(1))["model"] is state
    assert not current


def test_model_state_without_unreadable_part_keeps_attributes_of_torch() -> None:
    class Extra(torch.nn.Linear):  # type: ignore[misc]
        def get_extra_state(self) -> Any:
            return Path("here")

    marked = readable({"model": Extra(1, 1).state_dict()})["model"]
    assert type(marked) is OrderedDict
    assert marked._metadata  # type: ignore[attr-defined]


def test_warning_names_parts_of_each_object_once(caplog: pytest.LogCaptureFixture) -> None:
    warned: set[str] = set()
    for _ in range(2):
        readable({"schedulers": [{"f": print, "g": {"h": print}}, {"n": 1}], "best": Path("here")}, warned)
    texts = sorted(record.getMessage() for record in caplog.records)
    assert len(texts) == 2
    assert texts[0].startswith("leaving best out of checkpoints, as it could not be read back (pathlib.PosixPath): ")
    assert texts[1].startswith(
        "leaving schedulers.0.f, schedulers.0.g.h out of checkpoints, as it could not be read back ("
    )
