from __future__ import annotations

from pathlib import Path

from det_core.backend import LocalBackend
from det_core.journal import Journal, RunFolder


def _backend(folder: Path, **arguments: object) -> LocalBackend:
    return LocalBackend(folder, length=10, **arguments)  # type: ignore[arg-type]


def test_an_operation_once_completed_is_not_given_again(tmp_path: Path) -> None:
    backend = _backend(RunFolder.create(tmp_path, name="n").path)
    assert backend.next_operation() == 10
    backend.complete_operation(10, 0.5)
    backend.complete_operation(10, 0.5)
    assert backend.next_operation() is None


def test_completion_is_known_from_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, run_id="r", restart=0, rank=0)
    journal.record("operation", {"length": 10, "searcher_metric": 1.0})
    journal.close()
    assert _backend(tmp_path).next_operation() is None
    assert LocalBackend(tmp_path, length=11).next_operation() == 11


def test_best_validation_leaves_out_superseded_rows(tmp_path: Path) -> None:
    first = Journal(tmp_path, run_id="r", restart=0, rank=0)
    first.metrics("validation", 1, {"loss": 0.5})
    first.metrics("validation", 2, {"loss": 0.1})
    first.close()
    second = Journal(tmp_path, run_id="r", restart=1, rank=0)
    second.metrics("validation", 2, {"loss": 0.3})
    second.flush()
    assert _backend(tmp_path, searcher_metric="loss").best_validation() == 0.3
    assert _backend(tmp_path, searcher_metric="loss", smaller_is_better=False).best_validation() == 0.5
    assert _backend(tmp_path, searcher_metric="other").best_validation() is None
    second.close()
