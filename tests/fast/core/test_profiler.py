"""Sampling the machine: real sensors, the thread around them, and what happens when one breaks."""

from __future__ import annotations

import logging
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from det_core import client, core
from det_core.core._profiler import ProfilerContext
from det_core.core._profiler._mean import Mean
from det_core.core._profiler._sensors import Cpu, Disk, Memory, Network, Rates, machine_sensors
from det_core.errors import ContextClosed, MissingExtra, ProfilerError
from support.processes import until

psutil = pytest.importorskip("psutil")


class Reports:
    """Keeps what is reported, and says when."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int | None, Mapping[str, Any]]] = []
        self.times: list[float] = []

    def __call__(self, group: str, steps: int | None, metrics: Mapping[str, Any]) -> None:
        self.rows.append((group, steps, metrics))
        self.times.append(time.monotonic())

    def values(self, group: str) -> list[dict[str, Any]]:
        return [metrics["agent"] for name, _, metrics in self.rows if name == group]


class Counting:
    """A sensor whose readings are 1, 2, 3, ..."""

    group = "cpu"

    def __init__(self, read: Callable[[int], dict[str, Any]] = lambda n: {"n": n}) -> None:
        self.reads = 0
        self.closed = 0
        self._read = read

    def read(self) -> dict[str, Any]:
        self.reads += 1
        return self._read(self.reads)

    def close(self) -> None:
        self.closed += 1


class Failing(Counting):
    group = "gpu"

    def read(self) -> dict[str, Any]:
        self.reads += 1
        raise OSError("sensor unplugged")


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def profiler(reports: Reports) -> Iterator[Callable[..., ProfilerContext]]:
    made: list[ProfilerContext] = []

    def make(*sensors: Any, local_rank: int = 0) -> ProfilerContext:
        ranks: Any = SimpleNamespace(local_rank=local_rank)
        given = {"sensors": lambda: sensors} if sensors else {}
        made.append(ProfilerContext(ranks, reports, "agent", **given))
        return made[-1]

    yield make
    for context in made:
        try:
            context.close()
        except ProfilerError:
            continue


def sampling_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "det_core-profiler"]


def test_the_machine_is_reported_in_the_groups_of_the_contract(
    profiler: Callable[..., ProfilerContext], reports: Reports
) -> None:
    context = profiler()
    context.on(0.1, 3)
    until(lambda: len(reports.values("network")) >= 2)
    context.off()
    assert all(steps is None and list(metrics) == ["agent"] for _, steps, metrics in reports.rows)
    assert set(reports.values("cpu")[-1]) == {"cpu_util_simple"}
    assert all(0 <= row["cpu_util_simple"] <= 100 for row in reports.values("cpu"))
    assert 0 < reports.values("memory")[0]["memory_free"] <= psutil.virtual_memory().total
    assert set(reports.values("network")[0]) == {"net_throughput_sent", "net_throughput_recv"}
    assert 0 < reports.values("disk")[0]["/"]["disk_util"] <= 100
    if psutil.disk_io_counters() is not None:
        assert {"disk_iops", "disk_throughput_read", "disk_throughput_write"} < set(reports.values("disk")[0])


def test_a_report_is_the_mean_of_its_samples(profiler: Callable[..., ProfilerContext], reports: Reports) -> None:
    context = profiler(Counting(lambda n: {"n": n, "gpu-0": {"even": n} if n % 2 == 0 else {}}))
    context.on(0.1, 4)
    until(lambda: len(reports.rows) >= 2)
    context.off()
    assert reports.values("cpu")[:2] == [{"n": 2.5, "gpu-0": {"even": 3}}, {"n": 6.5, "gpu-0": {"even": 7}}]


def test_off_reports_the_last_samples_before_it_returns_and_nothing_after(
    profiler: Callable[..., ProfilerContext], reports: Reports
) -> None:
    sensor = Counting()
    context = profiler(sensor)
    context.on(0.1, 1000)
    until(lambda: sensor.reads >= 3)
    context.off()
    returned = time.monotonic()
    assert reports.values("cpu") == [{"n": (sensor.reads + 1) / 2}]
    assert reports.times[-1] <= returned
    assert sensor.closed == 1 and not sampling_threads()
    assert len(reports.rows) == 1


def test_off_does_not_wait_for_the_next_sample(profiler: Callable[..., ProfilerContext]) -> None:
    context = profiler(Counting())
    context.on(3600)
    context.off()


def test_on_and_off_are_idempotent(profiler: Callable[..., ProfilerContext], reports: Reports) -> None:
    sensor = Counting()
    context = profiler(sensor)
    context.off()
    context.on(0.1)
    context.on(5)
    assert len(sampling_threads()) == 1
    context.off()
    context.off()
    assert sensor.closed == 1 and len(reports.rows) == 1
    context.on(0.1)
    assert len(sampling_threads()) == 1
    context.close()
    context.close()
    assert not sampling_threads()
    with pytest.raises(ContextClosed, match="profiler"):
        context.on()


def test_a_broken_sensor_is_told_to_the_caller_and_stops_no_other(
    profiler: Callable[..., ProfilerContext], reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = Failing(), Counting()
    context = profiler(broken, good)
    with caplog.at_level(logging.WARNING, "det_core.core"):
        context.on(0.1, 1000)
        until(lambda: good.reads >= 3)
        with pytest.raises(ProfilerError, match=r"gpu \(\d+ times\): OSError: sensor unplugged"):
            context.on()
        before = broken.reads
        until(lambda: broken.reads > before)
        with pytest.raises(ProfilerError, match="sensor unplugged"):
            context.off()
    assert len([r for r in caplog.records if "sensor unplugged" in r.message]) <= 2
    assert [group for group, _, _ in reports.rows] == ["cpu"]
    assert not sampling_threads()
    context.close()


def test_a_failure_reaches_close(profiler: Callable[..., ProfilerContext]) -> None:
    broken = Failing()
    context = profiler(broken)
    context.on(0.1)
    until(lambda: broken.reads >= 1)
    with pytest.raises(ProfilerError, match="sensor unplugged"):
        context.close()
    assert broken.closed == 1
    context.close()


def test_a_report_that_fails_reaches_the_caller() -> None:
    def refuse(group: str, steps: int | None, metrics: Mapping[str, Any]) -> None:
        raise ValueError("journal is closed")

    ranks: Any = SimpleNamespace(local_rank=0)
    context = ProfilerContext(ranks, refuse, "agent", sensors=lambda: [Counting()])
    context.on(0.1)
    with pytest.raises(ProfilerError, match=r"reporting cpu .*journal is closed"):
        context.off()


def test_a_sensor_that_hangs_does_not_hang_off(
    profiler: Callable[..., ProfilerContext], reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.core._profiler._sampler.STOP_TIMEOUT", 0.2)
    release, entered = threading.Event(), threading.Event()

    def hang(n: int) -> dict[str, Any]:
        entered.set()
        assert release.wait()
        return {"n": n}

    context = profiler(Counting(hang))
    context.on(0.1)
    assert entered.wait()
    with pytest.raises(ProfilerError, match=r"cpu .*no answer"):
        context.off()
    release.set()
    for thread in sampling_threads():
        thread.join()
    assert reports.rows == []


def test_only_local_rank_0_samples_and_the_others_check_arguments(
    profiler: Callable[..., ProfilerContext], reports: Reports
) -> None:
    sensor = Counting()
    context = profiler(sensor, local_rank=1)
    context.on(0.1, 1)
    with pytest.raises(ValueError, match="sampling_interval"):
        context.on(0.01)
    context.off()
    context.close()
    assert sensor.reads == 0 and not reports.rows


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"sampling_interval": 0.09}, ValueError, "sampling_interval is 0.09"),
        ({"sampling_interval": float("nan")}, ValueError, "sampling_interval"),
        ({"sampling_interval": float("inf")}, ValueError, "sampling_interval"),
        ({"sampling_interval": "1"}, TypeError, "sampling_interval"),
        ({"sampling_interval": True}, TypeError, "sampling_interval"),
        ({"samples_per_report": 0}, ValueError, "samples_per_report is 0"),
        ({"samples_per_report": 1.5}, TypeError, "samples_per_report"),
        ({"samples_per_report": True}, TypeError, "samples_per_report"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    profiler: Callable[..., ProfilerContext], arguments: dict[str, Any], error: type[Exception], names: str
) -> None:
    context = profiler(Counting())
    with pytest.raises(error, match=names):
        context.on(**arguments)
    assert not sampling_threads()


def test_without_psutil_on_says_how_to_install_it(
    profiler: Callable[..., ProfilerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[profiler\]'"):
        profiler().on()


def test_without_pynvml_the_other_sensors_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [sensor.group for sensor in machine_sensors()] == ["cpu", "memory", "disk", "network"]


def burn() -> None:
    while True:
        pass


def test_a_process_that_computes_shows_in_the_cpu_utilisation() -> None:
    sensor = Cpu(psutil)
    assert sensor.read() == {}
    child = multiprocessing.get_context("fork").Process(target=burn)
    child.start()
    try:
        least = 0.3 * 100 / len(psutil.cpu_times(percpu=True))
        until(lambda: time.sleep(0.1) or least < sensor.read().get("cpu_util_simple", 0) <= 100)
    finally:
        child.kill()
        child.join()


def test_memory_that_is_taken_is_no_longer_free() -> None:
    sensor, held = Memory(psutil), []
    for _ in range(8):  # others may give some back meanwhile
        before = sensor.read()["memory_free"]
        block = bytearray(256 << 20)
        block[::4096] = b"x" * len(block[::4096])
        taken = before - sensor.read()["memory_free"]
        held.append(block)  # what is given back the kernel may keep at hand, and lend out again, uncounted
        if taken > 128 << 20:
            return
    pytest.fail(f"256 MB were taken, and {taken / 2**20:.0f} MB were gone")


def test_bytes_over_the_loopback_count_as_network() -> None:
    sensor = Network(psutil)
    assert sensor.read() == {}
    begin = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        got = threading.Thread(target=lambda: [None for _ in iter(lambda: receiver.recv(1 << 20), b"")])
        got.start()
        sender.sendall(bytes(8 << 20))
        sender.shutdown(socket.SHUT_WR)
        got.join()
    time.sleep(0.05)
    rates = sensor.read()
    for direction in ("net_throughput_sent", "net_throughput_recv"):
        assert rates[direction] * (time.monotonic() - begin) > 8 << 20


def test_a_written_file_counts_as_disk_throughput(tmp_path: Path) -> None:
    if psutil.disk_io_counters() is None:
        pytest.skip("no disk counters on this machine")
    import os

    sensor = Disk(psutil)
    assert set(sensor.read()) <= {"/", "/determined_shared_fs"}
    before = psutil.disk_io_counters().write_bytes
    with open(tmp_path / "file", "wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    if psutil.disk_io_counters().write_bytes == before:
        pytest.skip(f"{tmp_path} lies on no disk that is counted")
    reading = sensor.read()
    assert reading["disk_throughput_write"] > 0 and reading["disk_iops"] > 0


def test_disks_without_counters_still_tell_how_full_they_are() -> None:
    bare = SimpleNamespace(disk_io_counters=lambda: None, disk_usage=psutil.disk_usage)
    sensor = Disk(bare, disks=("/", "/no/such/place"))
    for _ in range(2):
        assert set(sensor.read()) == {"/"}
    assert Network(SimpleNamespace(net_io_counters=lambda: None)).read() == {}


def test_rates_skip_the_first_reading_and_counters_that_went_back() -> None:
    times = iter([0.0, 2.0, 4.0, 4.0, 5.0, 6.0])
    rates = Rates(clock=lambda: next(times))
    assert rates.of({"a": 10, "b": 5}) == {}
    assert rates.of({"a": 20, "b": 1}) == {"a": 5}
    assert rates.of({"a": 20, "b": 2, "new": 9}) == {"a": 0, "b": 0.5, "new": 0}
    assert rates.of({"a": 99}) == {}
    assert rates.of(None) == {}
    assert rates.of({"a": 99}) == {}


def test_a_mean_begins_anew_after_it_is_taken() -> None:
    mean = Mean()
    mean.add({"a": 1, "b": {"c": 4}})
    mean.add({"a": 2})
    assert mean.take() == {"a": 1.5, "b": {"c": 4}}
    assert mean.take() == {}


def test_a_context_journals_what_its_profiler_samples() -> None:
    with core.init(name="profiled") as ctx:
        ctx.profiler.on(0.1, 2)
        until(lambda: len(list(client.run(ctx.run_id).rows("memory"))) >= 2)
        ctx.train.report_training_metrics(1, {"loss": 0.5})
    assert not sampling_threads()
    run = client.run("latest")
    assert {"cpu", "memory", "disk", "network", "training"} <= set(run.groups())
    rows = list(run.rows("memory"))
    assert len(rows) >= 2 and all(row.steps_completed is None for row in rows)
    assert all(values["memory_free"] > 0 for row in rows for values in row.metrics.values())
