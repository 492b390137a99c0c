"""Reports reach a master once each and in order; lost ones raise in the next request and at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from det_core.backend._master import MasterInfo
from det_core.backend._shipper import ReportSender, Shipper
from det_core.errors import MasterError, MasterUnreachable, ReportsLost, ReportsNotShipped
from det_core.journal import Cursor, Journal, PendingValue
from det_core.protocol import MasterSession
from support.foreign_master import ForeignMaster, Trial, foreign_master
from support.processes import until
from support.proxy import LOST, SILENT, proxy_before


@pytest.fixture
def master() -> Iterator[ForeignMaster]:
    with foreign_master("0.37.0") as found:
        yield found


@pytest.fixture
def trial(master: ForeignMaster, tmp_path: Path) -> Trial:
    made = master.add_trial()
    master.start(made, tmp_path / "info")
    return made


@contextmanager
def shipping(folder: Path, url: str, trial: Trial, interval: float = 0.02) -> Iterator[tuple[Journal, Shipper]]:
    session = MasterSession(url, session_token=f"token-{trial.allocation_id}")
    journal = Journal(folder, run_id="r", restart=0, rank=0)
    sender = ReportSender(session, trial.trial_id, trial.run_id, MasterInfo("0.37.0"))
    cursor = Cursor(folder, 0, 0)
    shipper = Shipper([cursor], sender, session, flush=journal.flush, folder=folder, interval=interval)
    try:
        yield journal, shipper
    finally:
        journal.close()
        with suppress(ReportsNotShipped):
            shipper.close(0.1)
        session.close()


def test_reports_arrive_without_being_asked_for(master: ForeignMaster, trial: Trial, tmp_path: Path) -> None:
    with shipping(tmp_path, master.url, trial) as (journal, _):
        journal.metrics("training", 1, {"a": 1})
        until(lambda: trial.rows)
    assert trial.rows[0]["avg"] == {"a": 1} and trial.rows[0]["time"].endswith("+00:00")


def test_lost_answer_to_batch_metrics_doubles_nothing(master: ForeignMaster, trial: Trial, tmp_path: Path) -> None:
    """Batch metrics are refused the second time."""
    with proxy_before(master.url) as proxy, shipping(tmp_path, proxy.url, trial) as (journal, shipper):
        proxy.begin(lambda number, request: LOST if request.path.endswith("/metrics") and number % 2 else None)
        for step in range(6):
            journal.metrics("training", step, {"value": step}, [{"b": step}])
        shipper.drain(300)
    assert [r["avg"]["value"] for r in trial.rows] == list(range(6))
    assert sum(a.path.endswith("/metrics") for a in master.seen) > 6


def test_a_question_waits_no_longer_than_it_may(master: ForeignMaster, trial: Trial, tmp_path: Path) -> None:
    with proxy_before(master.url) as proxy, shipping(tmp_path, proxy.url, trial) as (journal, shipper):
        proxy.begin(lambda number, request: SILENT)
        journal.metrics("training", 1, {"a": 1})
        began = time.monotonic()
        with pytest.raises(MasterUnreachable, match=r"has not taken the reports in .* within 0 s.*reports are safe"):
            shipper.drain(0.3)
        with pytest.raises(ReportsNotShipped, match=r"1 report\(s\) did not get to"):
            shipper.close(0.3)
        assert time.monotonic() - began < 100


def test_a_value_that_never_comes_from_its_device_holds_nothing_up(
    master: ForeignMaster, trial: Trial, tmp_path: Path
) -> None:
    """SIGTERM's flush waited for it before its own clock began."""

    class Never(PendingValue):
        def ready(self) -> bool:
            return False

        def result(self) -> None:
            raise AssertionError("nobody is to wait for it")

    with pytest.MonkeyPatch.context() as patch, shipping(tmp_path, master.url, trial) as (journal, shipper):
        journal.metrics("training", 1, {"a": Never()})
        journal.metrics("training", 2, {"a": 2})
        shipper.drain(3)
        assert [r["avg"] for r in trial.rows] == [{"a": 2}]
        patch.setattr("det_core.journal._journal.DEVICE_TIMEOUT", 0.0)
        with pytest.raises(ReportsLost):
            journal.close()


def test_a_failure_of_the_thread_reaches_whoever_asks(master: ForeignMaster, trial: Trial, tmp_path: Path) -> None:
    with shipping(tmp_path, master.url, trial) as (journal, shipper):
        master.end(trial)
        journal.metrics("training", 1, {"a": 1})
        for _ in range(2):
            with pytest.raises(MasterError, match=r"do not get to the master any more: .* 401 invalid credentials"):
                shipper.drain(300)
        journal.metrics("training", 2, {"a": 1})  # a report never fails
        with pytest.raises(ReportsNotShipped, match=r"2 report\(s\) did not get to .*401"):
            shipper.close(10)


def test_rows_that_differ_are_refused_one_by_one(master: ForeignMaster, trial: Trial, tmp_path: Path) -> None:
    master.answer, right = (lambda *a: right(*a)), master.answer  # type: ignore[method-assign, assignment]
    with shipping(tmp_path, master.url, trial, interval=60) as (journal, shipper):
        trial.rows.append(
            {
                "group": "training",
                "steps": 2,
                "run": trial.run_id,
                "avg": {"a": 0},
                "batches": None,
                "hidden": False,
                "time": "",
            }
        )
        for step in (1, 2, 3):
            journal.metrics("training", step, {"a": step})
        with pytest.raises(MasterError, match=r"step 2: .*overwriting existing metric keys"):
            shipper.drain(300)
        shipper.drain(300)
        with pytest.raises(ReportsNotShipped, match="did not take a report: group 'training', step 2"):
            shipper.close(10)
    assert [r["avg"]["a"] for r in trial.rows] == [0, 1, 3]
