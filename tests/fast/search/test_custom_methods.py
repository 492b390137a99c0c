"""User-defined search methods."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from det_core.errors import SearchError
from det_core.search import (
    Completed,
    Create,
    Exited,
    Search,
    Shutdown,
    Started,
    TrainTo,
    _create,
    create_search,
)
from det_core.search._plain import RandomSearch
from det_core.search._preview import preview

HEAD = "from det_core.search import *\nfrom det_core.search import SearchMethod\n"
BODY = "class Mine(SearchMethod):\n    def handle(self, event):\n"


def custom(folder: Path, body: str, head: str = "") -> Search:
    code = head + HEAD + BODY + "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "mine.py").write_text(code)
    return create_search({"name": "custom", "class": "mine:Mine"}, {"x": 1}, 0, folder=str(folder))


def test_custom_method_of_two_experiments_imports_each_its_own_modules(tmp_path: Path) -> None:
    progress = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {number}\n")
        search = custom(folder, "return [SetProgress(VALUE / 10)]", head="from helper import VALUE\n")
        search.handle(Started())
        progress.append(search.progress())
    assert progress == [0.1, 0.2]


@pytest.mark.parametrize(
    "body, told",
    [
        ("return [TrainTo('nobody', 1)]", "decided on trial nobody, which it has not created"),
        ("a = self.create()\nreturn [a, a]", "twice"),
        ("a = self.create()\nreturn [a, Close(a.request_id), TrainTo(a.request_id, 1)]", "after closing it"),
        ("a = self.create()\nreturn [a, TrainTo(a.request_id, 1), TrainTo(a.request_id, 2)]", "before it completed 1"),
        ("return 1 / 0", r"search method Mine failed at Started\(\): ZeroDivisionError"),
    ],
)
def test_custom_method_with_invalid_decision_raises(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(SearchError, match=told):
        custom(tmp_path, body).handle(Started())


@pytest.mark.parametrize(
    "name, told",
    [
        (None, "expected 'module:Class'"),
        ("mine", "expected 'module:Class'"),
        ("missing:Mine", "ModuleNotFoundError"),
        ("mine:Other", "inherits from"),
    ],
)
def test_custom_method_of_invalid_class_is_rejected(tmp_path: Path, name: str | None, told: str) -> None:
    (tmp_path / "mine.py").write_text("class Other: pass\n")
    with pytest.raises(SearchError, match=told):
        create_search({"name": "custom", "class": name}, {}, 0, folder=str(tmp_path))


def test_custom_method_changed_since_keeps_recorded_decisions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "a = self.create()\nreturn [a, TrainTo(a.request_id, {length}), Close(a.request_id)]"
    first = custom(tmp_path, body.format(length=5))
    actions = first.handle(Started())
    changed = custom(tmp_path, body.format(length=60))
    with caplog.at_level(logging.WARNING):
        changed.apply(Started(), actions)
    assert "keeping the recorded decisions" in caplog.text
    assert changed.handle(Exited(actions[0].request_id, "completed"))[:1] != []  # type: ignore[union-attr]
    again = custom(tmp_path, body.format(length=60))
    again.apply(Started(), actions)
    with pytest.raises(SearchError, match="expected 5"):
        again.handle(Completed(actions[0].request_id, 60, 1.0))  # type: ignore[union-attr]
    caplog.clear()
    custom(tmp_path, "return []").apply(Started(), actions)
    assert "keeping the recorded decisions" in caplog.text, "also if it decides less"


def test_custom_method_that_decides_on_ended_trial_is_not_followed(tmp_path: Path) -> None:
    search = custom(
        tmp_path,
        "if event.kind == 'started':\n"
        "    return [self.create(), self.create()]\n"
        "return [TrainTo(event.request_id, 9), Close(event.request_id), Shutdown()]",
    )
    first, _ = search.handle(Started())
    assert isinstance(first, Create)
    assert search.handle(Exited(first.request_id, "errored")) == [Shutdown()], "it had exited before"
    assert search.over and search.progress() == 1.0


def test_preview_of_shipped_method_needs_no_halving_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    # Searches by halving have keys that a preview reads, and this one has not.
    monkeypatch.setitem(_create._METHODS, "mine", RandomSearch)
    found = preview({"name": "mine", "metric": "loss", "max_trials": 3, "max_length": 4}, {"x": 1}, 0)
    assert found["trials"] == 3 and found["units"] == found["units_if_all_trained_fully"] == 12


def test_custom_method_recovered_keeps_trials_and_random_numbers(tmp_path: Path) -> None:
    body = "unused = self.create()\na = self.create({'x': self.random.random()})\nreturn [a, TrainTo(a.request_id, 5)]"
    first = custom(tmp_path, body)
    (a, train), again = first.handle(Started()), custom(tmp_path, body)
    again.apply(Started(), [a, train])
    assert isinstance(a, Create)
    done = Completed(a.request_id, 5, 1.0)
    assert again.handle(done) == first.handle(done)


def test_custom_method_recovered_keeps_order_of_trials(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Also of an earlier version, which drew other IDs.
    body = "a, b = self.create({'x': 1}), self.create({'x': 2})\nreturn [b, TrainTo(b.request_id, 7), a]"
    actions = custom(tmp_path, body).handle(Started())
    custom(tmp_path, body).apply(Started(), actions)
    assert not caplog.records
    # of another size than the one before: Python tells a module's bytecode by the second and the size of its source
    body = "a, b = self.create({'x': 1}), self.create({'x': 2})\nreturn [a, b, TrainTo(b.request_id, 70)]"
    custom(tmp_path, body).apply(Started(), [Create("1", {"x": 1}, 3), Create("2", {"x": 2}, 3), TrainTo("2", 70)])
    assert not caplog.records
