"""The contract of backends, run on each of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from det_core.backend import LocalBackend
from det_core.backend._master import MasterInfo, get_master_info
from det_core.backend._rest import RestBackend, Task
from det_core.backend._shipper import BatchSender, ReportSender, Shipper
from det_core.journal import Cursor, Journal
from det_core.protocol import MasterSession
from support.backend_suite import BackendCase, BackendSuite
from support.foreign_master import foreign_master
from support.ours import config
from support.running_master import Running
from support.scripted_backend import ScriptedBackend


class WithMetrics(BackendSuite):
    """Contract of a backend that answers with the metrics of a validation."""

    def test_last_validation_is_the_newest_with_its_metrics(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, self.lengths) as case:
            assert (case.backend.last_validation(), case.backend.last_validation_metrics()) == (None, {})
            for step, loss in enumerate((3.0, 1.0, 2.0), 1):
                case.journal.metrics("validation", step, {"loss": loss, "error": step})
                assert case.backend.last_validation() == step
                assert case.backend.last_validation_metrics() == {"loss": loss, "error": step}


class TestLocal(WithMetrics):
    """A bare run's."""

    @contextmanager
    def opened(self, folder: Path, lengths: Sequence[int]) -> Iterator[BackendCase]:
        journal = Journal(folder, run_id="run", restart=0, rank=0)
        journal.record("run_start", {})
        yield BackendCase(LocalBackend(folder, length=lengths[0], searcher_metric="loss"), journal)
        journal.close()


class Rest(BackendSuite):
    """Under a foreign master of some release."""

    version = ""

    @contextmanager
    def opened(self, folder: Path, lengths: Sequence[int]) -> Iterator[BackendCase]:
        with foreign_master(self.version) as master:
            trial = master.add_trial(lengths=tuple(lengths))
            master.start(trial, folder / "info")
            session = MasterSession(master.url, session_token=f"token-{trial.allocation_id}")
            journal = Journal(folder, run_id="run", restart=0, rank=0)
            info = MasterInfo(self.version)
            sender = ReportSender(session, trial.trial_id, trial.run_id, info)
            shipper = Shipper([Cursor(folder, 0, 0)], sender, session, flush=journal.flush, folder=folder)
            task = Task(trial.trial_id, 1, trial.run_id, trial.task_id, trial.allocation_id, trial.config["searcher"])
            backend = RestBackend(session, info, task, shipper)
            yield BackendCase(backend, journal, lambda: master.preempt(trial))
            journal.close()
            backend.close()


class TestRestOfOperations(Rest):
    version = "0.37.0"
    lengths = (3, 6, 9)


class TestRestOfLengths(Rest):
    version = "0.38.1"


class TestRestOfOurs(WithMetrics):
    """Under our own master, with an engine that starts nothing."""

    @contextmanager
    def opened(self, folder: Path, lengths: Sequence[int]) -> Iterator[BackendCase]:
        (folder / "home").mkdir()
        running = Running(folder / "home", 1 << 20)
        try:
            spec = running.a_trial(config(folder, lengths[0]))
            session = MasterSession(running.url, session_token=spec.session_token)
            journal = Journal(folder, run_id="run", restart=0, rank=0)
            sender = BatchSender(session, spec.trial_id, spec.trial_run_id)
            shipper = Shipper([Cursor(folder, 0, 0)], sender, session, flush=journal.flush, folder=folder)
            ids = (spec.trial_id, spec.experiment_id, spec.trial_run_id, spec.task_id, spec.allocation_id)
            backend = RestBackend(session, get_master_info(session), Task(*ids, spec.config["searcher"]), shipper)
            pause = f"experiments/{spec.experiment_id}/pause"
            yield BackendCase(backend, journal, lambda: running.ask("POST", pause))
            journal.close()
            backend.close()
        finally:
            running.close()


class TestScripted(BackendSuite):
    lengths = (2, 5)

    @contextmanager
    def opened(self, folder: Path, lengths: Sequence[int]) -> Iterator[BackendCase]:
        journal = Journal(folder, run_id="run", restart=0, rank=0)
        backend = ScriptedBackend(lengths)

        def best(group: str, steps: int | None, metrics: Any, batches: Any = None) -> None:
            if group == "validation":
                backend.best = min(metrics["loss"], backend.best or metrics["loss"])

        journal.metrics = best  # type: ignore[method-assign]
        yield BackendCase(backend, journal, backend.preempt)
        journal.close()
