"""Contract of every backend, as tests to inherit.

::

    class TestMyBackend(BackendSuite):
        @contextmanager
        def opened(self, folder, lengths): ...; yield BackendCase(backend, journal, preempt)
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.backend import Backend
from det_core.errors import DetCoreError
from det_core.journal import Journal
from support.processes import threads_in, until


@dataclass(frozen=True)
class BackendCase:
    """A backend to test.

    Attributes:
        backend: of a trial that is trained to the lengths that were asked for. Its best validation is the smallest
            ``loss``.
        journal: where its contexts would report.
        preempt: asks the trial to stop; None: nobody can, as in a bare run.
    """

    backend: Backend
    journal: Journal
    preempt: Callable[[], None] | None = None


class BackendSuite(ABC):
    """Inherit, and say how to make the backend."""

    lengths: Sequence[int] = (4,)
    """The operations that a trial gets; a backend that gives but one keeps this."""

    @abstractmethod
    def opened(self, folder: Path, lengths: Sequence[int]) -> AbstractContextManager[BackendCase]:
        """Yield a backend for a new trial with its journal; both are closed when the block ends."""

    def test_operations_come_until_each_was_completed(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            given = []
            while (length := case.backend.next_operation()) is not None:
                assert case.backend.next_operation() == length, "asking changes nothing"
                given.append(length)
                assert len(given) <= len(self.lengths), "an operation that was completed comes again"
                self.complete(case, length)
            assert given == list(self.lengths)
            assert case.backend.next_operation() is None
            case.journal.record("out_of_operations", {})
            case.backend.acknowledge_out_of_operations()

    def test_what_was_said_may_be_said_again(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            for _ in range(2):
                case.journal.record("preempt", {"acknowledged": True, "call": 1})
                case.backend.acknowledge_preemption()
                case.backend.checkpoint_deleted("unknown", {})

    def test_a_question_comes_after_the_reports_before_it(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            assert case.backend.best_validation() is None, "there is none yet"
            for step, loss in enumerate((3.0, 1.0, 2.0), 1):
                case.journal.metrics("training", step, {"loss": loss / 10})
                case.journal.metrics("validation", step, {"loss": loss})
                best = case.backend.best_validation()
                assert best == min((3.0, 1.0, 2.0)[:step]), f"after a loss of {loss} the best is {best}"

    def test_metadata_is_what_was_set_last(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            assert case.backend.get_metadata() == {}
            for metadata in ({"a": 1, "b": {"c": [1.5, None, "x", True]}}, {"d": 2}):
                case.journal.record("metadata", {"metadata": metadata})
                assert case.backend.set_metadata(metadata) == metadata
                assert case.backend.get_metadata() == metadata, "what was set before is still there"

    def test_a_checkpoint_is_registered_once(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            for steps in (1, 2):
                record = checkpoint(f"00000000-0000-0000-0000-00000000000{steps}", steps)
                case.journal.record("checkpoint", record)
                case.backend.register_checkpoint(record)
            found = case.backend.checkpoint_metadata(record["storage_id"])
            assert found in (None, record["metadata"]), f"its metadata is {found}"
            case.journal.record("checkpoint_deleted", {"storage_id": record["storage_id"], "resources": {}})
            case.backend.checkpoint_deleted(record["storage_id"], {})

    def test_alerts_and_early_exits_are_taken(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            for level in ("debug", "info", "warning", "error"):
                case.journal.record("alert", {"title": "t", "description": "d", "level": level})
                case.backend.alert("t", "d", level)
            case.journal.record("early_exit", {"reason": "INVALID_HP"})
            case.backend.early_exit("INVALID_HP")

    def test_nobody_asks_to_stop(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            assert case.backend.preempted(0) is False

    def test_whoever_waits_is_woken(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            if case.preempt is None:
                return
            answers: list[bool] = []
            thread = threading.Thread(target=lambda: answers.append(case.backend.preempted(60)))
            thread.start()
            until(lambda: threads_in("preempted") or not thread.is_alive())
            began = _clock.monotonic()
            case.preempt()
            thread.join()
            assert answers == [True], "the request to stop did not come through"
            assert _clock.monotonic() - began < 30, "it came at the end of the wait"
            assert case.backend.preempted(0), "what was asked for is forgotten"

    def test_waiting_can_be_ended(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:

            def wait() -> None:
                try:
                    case.backend.preempted(60)
                except DetCoreError:
                    return

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            until(lambda: threads_in("preempted") or not thread.is_alive())
            began = _clock.monotonic()
            case.backend.stop_waiting()
            thread.join()
            assert _clock.monotonic() - began < 30, "stop_waiting() does not end preempted()"

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            case.journal.metrics("training", 1, {"loss": 1.0})
            case.journal.close()
            case.backend.close()
            case.backend.close()

    @staticmethod
    def complete(case: BackendCase, length: int) -> None:
        """Complete an operation as a script does."""
        case.journal.record("operation", {"length": length, "searcher_metric": 1 / length})
        case.backend.complete_operation(length, 1 / length)


def checkpoint(storage_id: str, steps: int) -> dict[str, Any]:
    """Return a checkpoint's record, as contexts journal it."""
    return {
        "storage_id": storage_id,
        "steps_completed": steps,
        "metadata": {"steps_completed": steps, "note": "x"},
        "resources": {"model.pt": 3, "sub/": 0, "metadata.json": 30},
        "run_id": "run",
        "restart": 0,
        "ordinal": steps,
        "time": _clock.iso(1.7e9 + steps),
    }
