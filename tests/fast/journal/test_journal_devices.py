"""Values that arrive later: their row keeps its place, is written when they are there, and never blocks a report."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import ReportsNotKept
from det_core.journal import PendingValue, read_run
from support.journals import lines, open_journal, written


class Scripted(PendingValue):
    """A value that arrives when the test says so."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._there = threading.Event()

    def arrive(self) -> Scripted:
        self._there.set()
        return self

    def ready(self) -> bool:
        return self._there.is_set()

    def result(self) -> Any:
        assert self._there.is_set(), "nobody is to wait without a deadline"
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a device."""
    monkeypatch.setattr("det_core.journal._journal.DEVICE_PATIENCE", 0.05)


@pytest.mark.parametrize("by", ["metrics", "device", "flush", "close"])
def test_later_rows_do_not_wait_and_the_row_keeps_its_place(tmp_path: Path, by: str) -> None:
    journal = open_journal(tmp_path)
    loss = Scripted(float("inf"))
    journal.metrics("training", 0, {"loss": 1.0})
    journal.metrics("training", 1, {"loss": loss, "lr": 0.1})
    journal.metrics("training", 2, {"loss": 2.0})
    journal.record("status", {"status": "fit"})
    assert written(tmp_path) == {0: {"loss": 1.0}, 2: {"loss": 2.0}}
    loss.arrive()
    if by == "metrics":
        journal.metrics("training", 3, {"loss": 3.0})
    elif by == "device":
        journal.metrics("training", 3, {"loss": Scripted(3.0).arrive()})
    else:
        getattr(journal, by)()
    assert written(tmp_path)[1] == {"loss": float("inf"), "lr": 0.1}
    journal.close()
    rows = read_run(tmp_path).rows("training")
    assert [(r.steps_completed, r.seq, r.metrics) for r in rows[:3]] == [
        (0, 0, {"loss": 1.0}),
        (1, 1, {"loss": float("inf"), "lr": 0.1}),
        (2, 2, {"loss": 2.0}),
    ]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_flush_and_close_wait_for_what_is_under_way(tmp_path: Path, end: str) -> None:
    journal = open_journal(tmp_path)
    values = [Scripted(step) for step in range(20)]
    for step, value in enumerate(values):
        journal.metrics("training", step, {"a": {"b": [value, 1]}}, [{"x": value}])
    late = threading.Timer(0.2, lambda: [value.arrive() for value in reversed(values)])
    late.start()
    getattr(journal, end)()
    assert written(tmp_path) == {step: {"a": {"b": [step, 1]}} for step in range(20)}
    assert read_run(tmp_path).rows("training", batches=True)[7].batch_metrics == [{"x": 7}]
    journal.close()
    late.join()


@pytest.mark.usefixtures("no_patience")
def test_a_value_that_never_comes_makes_nobody_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As behind a collective whose peer has died. flush() and close() waited for it without a deadline."""
    journal = open_journal(tmp_path)
    never, late = Scripted(1.0), Scripted(2.0)
    journal.metrics("training", 1, {"a": never, "b": 1})
    journal.metrics("training", 2, {"a": late})
    journal.flush()
    assert "the values of 2 report(s) have not come from their device within 0 s" in caplog.text
    journal.metrics("training", 1, {"a": 5.0})  # cannot be compared
    late.arrive()
    with pytest.raises(TypeError, match=r'body\["value"\] is on a device: report it as a metric'):
        journal.record("alert", {"value": never})
    journal.record("run_end", {"outcome": "completed"})
    with pytest.raises(ReportsNotKept, match=r"1 value\(s\) never arrived"):
        journal.close()
    assert written(tmp_path) == {1: {"a": 5.0, "b": 1}, 2: {"a": 2.0}}
    assert 'metrics["a"] of group training, step 1 is lost: it has not come from its device' in caplog.text
    assert read_run(tmp_path).state == "incomplete"


def test_a_value_that_is_lost_is_named_and_the_rest_of_its_row_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": Scripted(RuntimeError("device-side assert")).arrive(), "b": 2})
    journal.metrics("training", 2, {"a": [Scripted(object()).arrive(), 5]})
    with (
        caplog.at_level(logging.WARNING, "det_core"),
        pytest.raises(ReportsNotKept, match=r"2 value\(s\) never arrived"),
    ):
        journal.close()
    assert written(tmp_path) == {1: {"b": 2}, 2: {"a": [None, 5]}}
    assert 'metrics["a"] of group training, step 1 is lost: device-side assert' in caplog.text
    assert any(b'"lost":["metrics[\\"a\\"]"]' in line for line in lines(tmp_path))


def test_a_lost_value_is_counted_also_where_it_was_waited_for(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"b": 2})
    journal.metrics("training", 1, {"a": Scripted(RuntimeError("gone")).arrive(), "b": Scripted(2).arrive()})
    with pytest.raises(ReportsNotKept, match=r"1 value\(s\) never arrived"):
        journal.close()
    assert written(tmp_path) == {1: {"b": 2}}


def test_disjoint_keys_of_a_pending_step_do_not_wait_and_equal_ones_are_compared(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    first = Scripted(1.0)
    journal.metrics("training", 1, {"a": first})
    journal.metrics("training", 1, {"b": 2.0})
    journal.metrics("training", 2, {"b": 3.0})
    journal.metrics("training", 1, {"c": 4.0})
    late = threading.Timer(0.2, first.arrive)
    late.start()
    with pytest.raises(ValueError, match=r"step 1, key 'a': 1.0 was reported before, and now 7.0"):
        journal.metrics("training", 1, {"a": 7.0})  # waits for it
    late.join()
    journal.metrics("training", 1, {"a": 1.0, "d": Scripted(5).arrive()})
    with pytest.raises(ValueError, match=r"step 1, key 'a': 1.0 was reported before, and now 2.0"):
        journal.metrics("training", 1, {"a": Scripted(2.0).arrive()})
    journal.close()
    assert written(tmp_path) == {1: {"a": 1.0, "b": 2.0, "c": 4.0, "d": 5}, 2: {"b": 3.0}}


def test_no_thread_is_started(tmp_path: Path) -> None:
    before = threading.active_count()
    journal = open_journal(tmp_path)
    for step in range(100):
        journal.metrics("training", step, {"a": Scripted(1) if step % 2 else 1})
    assert threading.active_count() == before
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReportsNotKept, match=r"50 value\(s\)"):
        patch.setattr("det_core.journal._journal.DEVICE_PATIENCE", 0.0)
        journal.close()


def test_threads_may_report_at_once(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)

    def report(worker: int) -> None:
        for step in range(200):
            value: Any = Scripted(step).arrive() if step % 7 == worker % 7 else step
            journal.metrics(f"g{worker}", step, {"a": value})
            journal.metrics("shared", step, {f"k{worker}": value})

    threads = [threading.Thread(target=report, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    for worker in range(6):
        assert written(tmp_path, f"g{worker}") == {s: {"a": s} for s in range(200)}
    assert written(tmp_path, "shared") == {s: {f"k{w}": s for w in range(6)} for s in range(200)}
    seqs = [json.loads(line)["seq"] for line in lines(tmp_path)[1:]]
    assert sorted(seqs) == list(range(2400))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_cuda_tensor_is_read_without_a_sync_and_as_it_was(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    journal = open_journal(tmp_path)
    loss = torch.ones((), device="cuda")
    journal.metrics("training", 0, {"loss": loss, "row": torch.arange(3, device="cuda")})
    journal.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 100):
            torch.cuda._sleep(1_000_000)
            loss += 1
            journal.metrics("training", step, {"loss": loss})
            loss.add_(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss.zero_()
    journal.close()
    found = written(tmp_path)
    assert found[0] == {"loss": 1.0, "row": [0, 1, 2]}
    assert [found[s]["loss"] for s in range(1, 100)] == [float(s + 1) for s in range(1, 100)]
