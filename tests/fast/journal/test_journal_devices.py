"""Values that arrive later: their row keeps its place, is written when they are there, and never blocks a report."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from det_core.errors import ReportsLost
from det_core.journal import PendingValue, _devices, read_run
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
    monkeypatch.setattr("det_core.journal._journal.DEVICE_TIMEOUT", 0.05)


@pytest.mark.parametrize("by", ["metrics", "device", "flush", "close"])
def test_pending_row_keeps_its_place_and_delays_no_later_row(tmp_path: Path, by: str) -> None:
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
def test_flush_and_close_wait_for_pending_values(tmp_path: Path, end: str) -> None:
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
def test_value_that_never_arrives_blocks_nothing_beyond_the_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a collective whose peer has died. flush() and close() waited for it without a deadline."""
    journal = open_journal(tmp_path)
    never, late = Scripted(1.0), Scripted(2.0)
    journal.metrics("training", 1, {"a": never, "b": 1})
    journal.metrics("training", 2, {"a": late})
    journal.flush()
    assert "2 report(s) still wait for their device after 0 s" in caplog.text
    journal.metrics("training", 1, {"a": 5.0})  # cannot be compared
    late.arrive()
    with pytest.raises(TypeError, match=r'body\["value"\] is on a device: report it as a metric'):
        journal.record("alert", {"value": never})
    journal.record("run_end", {"outcome": "completed"})
    with pytest.raises(ReportsLost, match=r"1 value\(s\) in .*: they never arrived"):
        journal.close()
    assert written(tmp_path) == {1: {"a": 5.0, "b": 1}, 2: {"a": 2.0}}
    assert 'lost metrics["a"] of group training, step 1: it has not arrived from its device' in caplog.text
    assert read_run(tmp_path).state == "incomplete"


def test_lost_value_is_named_and_the_rest_of_its_row_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"a": Scripted(RuntimeError("device-side assert")).arrive(), "b": 2})
    journal.metrics("training", 2, {"a": [Scripted(object()).arrive(), 5]})
    with (
        caplog.at_level(logging.WARNING, "det_core"),
        pytest.raises(ReportsLost, match=r"2 value\(s\) in .*: they never arrived"),
    ):
        journal.close()
    assert written(tmp_path) == {1: {"b": 2}, 2: {"a": [None, 5]}}
    assert 'lost metrics["a"] of group training, step 1: device-side assert' in caplog.text
    assert any(b'"lost":["metrics[\\"a\\"]"]' in line for line in lines(tmp_path))


def test_lost_value_of_a_repeated_step_is_counted(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.metrics("training", 1, {"b": 2})
    journal.metrics("training", 1, {"a": Scripted(RuntimeError("gone")).arrive(), "b": Scripted(2).arrive()})
    with pytest.raises(ReportsLost, match=r"1 value\(s\) in .*: they never arrived"):
        journal.close()
    assert written(tmp_path) == {1: {"b": 2}}


def test_pending_step_compares_equal_keys_and_not_others(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    first = Scripted(1.0)
    journal.metrics("training", 1, {"a": first})
    journal.metrics("training", 1, {"b": 2.0})
    journal.metrics("training", 2, {"b": 3.0})
    journal.metrics("training", 1, {"c": 4.0})
    late = threading.Timer(0.2, first.arrive)
    late.start()
    with pytest.raises(ValueError, match=r"step 1, key 'a' changed from 1.0 to 7.0"):
        journal.metrics("training", 1, {"a": 7.0})  # waits for it
    late.join()
    journal.metrics("training", 1, {"a": 1.0, "d": Scripted(5).arrive()})
    with pytest.raises(ValueError, match=r"step 1, key 'a' changed from 1.0 to 2.0"):
        journal.metrics("training", 1, {"a": Scripted(2.0).arrive()})
    journal.close()
    assert written(tmp_path) == {1: {"a": 1.0, "b": 2.0, "c": 4.0, "d": 5}, 2: {"b": 3.0}}


def test_report_of_pending_values_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    journal = open_journal(tmp_path)
    for step in range(100):
        journal.metrics("training", step, {"a": Scripted(1) if step % 2 else 1})
    assert threading.active_count() == before
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReportsLost, match=r"50 value\(s\)"):
        patch.setattr("det_core.journal._journal.DEVICE_TIMEOUT", 0.0)
        journal.close()


def test_reports_of_several_threads_are_all_written(tmp_path: Path) -> None:
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


class Device:
    """Makes the CPU a device whose copies arrive when the test says so, into real memory that is used again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.copies: list[tuple[Any, int]] = []
        self.fails: str | None = None
        self.has_arrived = False
        monkeypatch.setitem(_devices.BUFFER_TYPES, "cpu", lambda *arguments: Buffer(self, *arguments))

    def report(self, journal: Any, step: int, values: dict[str, Any], group: str = "training", **more: Any) -> None:
        """Report on the careful path, where tensors of devices go: a dict would be read in the call."""
        journal.metrics(group, step, OrderedDict(values), **more)


class Buffer:
    def __init__(self, device: Device, _: Any, dtype: Any, size: int) -> None:
        torch = pytest.importorskip("torch")
        self._device = device
        self.host = torch.empty(size, dtype=dtype)
        device.made.append(self)

    def copy(self, source: Any) -> None:
        if self._device.fails:
            raise RuntimeError(self._device.fails)
        self._device.copies.append((source.dtype, source.numel()))
        self.host[: source.numel()].copy_(source)

    def ready(self) -> bool:
        return self._device.has_arrived

    def wait(self) -> None:
        raise AssertionError("nobody is to wait without a deadline")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_report_of_tensors_makes_one_copy_for_each_dtype(tmp_path: Path, device: Device) -> None:
    torch = pytest.importorskip("torch")
    journal = open_journal(tmp_path)
    numbers = {f"n{i}": torch.tensor(float(i), requires_grad=i % 2 == 0) for i in range(100)}
    arrays = {"row": torch.arange(6.0).view(2, 3), "column": torch.arange(6.0).view(2, 3).t(), "none": torch.empty(0)}
    others = {"flag": torch.tensor(True), "count": torch.tensor(7), "nan": torch.tensor(float("nan"))}
    given = numbers | arrays | others | {"deep": {"list": [1, torch.tensor(0.5), torch.tensor(8)]}}
    device.report(journal, 1, given, batch_metrics=[{"loss": torch.tensor(2.5)}])
    assert sorted(device.copies, key=str) == [(torch.bool, 1), (torch.float32, 115), (torch.int64, 2)]
    with torch.no_grad():
        for tensor in [*numbers.values(), *arrays.values(), *others.values()]:
            tensor.zero_()
    device.has_arrived = True
    journal.close()
    (row,) = read_run(tmp_path).rows("training", batches=True)
    assert repr(row.metrics.pop("nan")) == "nan"
    assert row.metrics == {f"n{i}": float(i) for i in range(100)} | {
        "row": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "column": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        "none": [],
        "flag": True,
        "count": 7,
        "deep": {"list": [1, 0.5, 8]},
    }
    assert list(row.metrics)[:100] == list(numbers), "keys keep their order"
    assert row.batch_metrics == [{"loss": 2.5}]


def test_buffers_are_reused_in_any_autograd_mode(tmp_path: Path, device: Device) -> None:
    torch = pytest.importorskip("torch")
    journal = open_journal(tmp_path)
    with torch.inference_mode():  # a buffer made here could not be written outside
        device.report(journal, 0, {"a": torch.tensor(0.0)})
    weight = torch.tensor(1.0, requires_grad=True)
    for step in range(1, 20):
        device.has_arrived = step % 5 == 0
        device.report(journal, step, {"a": weight * step, "b": weight})
    assert len(device.made) == 6, "as many as were under way at once"
    assert not any(buffer.host.requires_grad for buffer in device.made), "a graph would be kept alive"
    device.report(journal, 20, {"a": torch.arange(3.0).repeat(_devices.BUFFER_ELEMENTS)})
    device.has_arrived = True
    journal.close()
    rows = written(tmp_path)
    assert rows.pop(0) == {"a": 0.0}
    assert rows.pop(20) == {"a": [0.0, 1.0, 2.0] * _devices.BUFFER_ELEMENTS}
    assert rows == {step: {"a": float(step), "b": 1.0} for step in range(1, 20)}


def test_failed_copy_names_each_of_its_values(tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    journal = open_journal(tmp_path)
    device.fails = "device-side assert"
    device.report(journal, 1, {"a": torch.tensor(1.0), "b": [torch.tensor(2.0), 3], "c": 4})
    device.fails = None
    device.has_arrived = True
    device.report(journal, 2, {"a": torch.tensor(1.0)})
    with pytest.raises(ReportsLost, match=r"2 value\(s\) in .*: they never arrived"):
        journal.close()
    assert written(tmp_path) == {1: {"b": [None, 3], "c": 4}, 2: {"a": 1.0}}
    assert caplog.text.count("of group training, step 1: device-side assert") == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_invalid_tensor_among_others_is_rejected(tmp_path: Path, device: Device) -> None:
    torch = pytest.importorskip("torch")
    journal = open_journal(tmp_path)
    number = torch.tensor(1.0)
    for value, message in (
        (torch.tensor(1.0).to_sparse(), r'metrics\["b"\]: a sparse tensor cannot'),
        (torch.eye(2).to_sparse_csr(), r'metrics\["b"\]: a sparse tensor cannot'),
        (torch.zeros(101, 100), r'metrics\["b"\] is a Tensor of 10,100 elements'),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            device.report(journal, 1, {"a": number, "b": value})
    assert not device.copies, "nothing is copied of what is refused"
    journal.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_tensor_changed_after_the_report_keeps_its_value(tmp_path: Path) -> None:
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


def test_cuda_tensors_of_several_streams_dtypes_and_devices_keep_their_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    journal = open_journal(tmp_path)
    side = torch.cuda.Stream()
    for step in range(300):
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
            loss = torch.full((), float(step), device="cuda", requires_grad=True) * 1
            row = torch.arange(step, step + 3, device="cuda")
            values = {f"cuda:{n}": torch.full((), float(step), device=n) for n in range(torch.cuda.device_count())}
            half = torch.full((2,), 0.5, device="cuda", dtype=torch.bfloat16)
            journal.metrics("training", step, {"loss": loss, "again": loss * 2, "row": row, "half": half, **values})
            del loss, half
            row.zero_()
            torch.full((1000,), -1.0, device="cuda")  # takes the memory of what was let go of
    journal.close()
    for step, found in written(tmp_path).items():
        assert step is not None
        expected = {"loss": step, "again": 2 * step, "row": [step, step + 1, step + 2], "half": [0.5, 0.5]}
        assert found == expected | {f"cuda:{n}": step for n in range(torch.cuda.device_count())}
