"""Tensors as values, batch metrics and steps: as ``test_journal_values.py`` has it for all other kinds of numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fast.journal import test_journal_values as values
from support.journals import open_journal, written

torch = pytest.importorskip("torch")

ACCEPTED = [
    (torch.tensor(0.5), 0.5),
    (torch.tensor(7), 7),
    (torch.tensor(True), True),
    (torch.tensor([1.0, math.nan]), [1.0, math.nan]),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(1.0, requires_grad=True) * 2, 2.0),
    (torch.nn.Parameter(torch.ones(1)), [1.0]),
]


@pytest.mark.parametrize(("value", "read"), ACCEPTED)
def test_accepted_tensors_are_read_back(tmp_path: Path, value: Any, read: Any) -> None:
    values.test_accepted_values_are_read_back(tmp_path, value, read)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"a": torch.tensor(1j)}, TypeError, r'metrics\["a"\]: a torch.complex64 tensor cannot'),
        ({"a": torch.empty(1, device="meta")}, TypeError, r'metrics\["a"\]: a meta tensor cannot'),
        ({"a": torch.eye(2).to_sparse()}, TypeError, r'metrics\["a"\]: a sparse tensor cannot'),
        ({"a": torch.zeros(101, 100)}, ValueError, r'metrics\["a"\] is .*[Tt]ensor of 10,100 elements.*its mean'),
    ],
)
def test_tensor_beyond_json_is_rejected_by_its_path(
    tmp_path: Path, metrics: Any, error: type[Exception], message: str
) -> None:
    values.test_value_beyond_json_is_rejected_by_its_path(tmp_path, metrics, error, message)


@pytest.mark.parametrize("steps", [torch.tensor(True), torch.tensor(1.0)])
def test_steps_other_than_integers_are_rejected(tmp_path: Path, steps: Any) -> None:
    values.test_steps_other_than_integers_are_rejected(tmp_path, steps, TypeError)


def test_integer_tensor_is_accepted_as_step(tmp_path: Path) -> None:
    values.test_integers_of_other_types_are_accepted_as_steps(tmp_path, torch.tensor(3))


def test_value_changed_after_the_report_keeps_its_row(tmp_path: Path) -> None:
    journal, loss = open_journal(tmp_path), torch.tensor(0.5)
    for step in (1, 2):
        journal.metrics("training", step, {"loss": loss})
        loss.zero_()
        loss += 0.5
    loss.zero_()
    journal.close()
    assert written(tmp_path) == {1: {"loss": 0.5}, 2: {"loss": 0.5}}


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_error_of_a_signal_handler_during_a_tensor_read_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """orjson makes a TypeError of whatever its ``default`` raises, as of a value of no known type."""

    class Interrupted(torch.Tensor):
        def item(self) -> Any:
            raise error("from a handler")

    monkeypatch.setattr(Interrupted, "__module__", "torch")
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"loss": 1.0})
    with pytest.raises(error, match="from a handler"):
        journal.metrics("training", 2, {"loss": torch.tensor(1.0).as_subclass(Interrupted)})
    journal.metrics("training", 2, {"loss": 2.0})
    journal.close()
    assert written(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
