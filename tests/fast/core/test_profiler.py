"""Sampling the machine by the real sensors: what is reported, and what happens when one of them breaks."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from det_core import client, core
from det_core.errors import ContextClosed, MissingExtra
from support.processes import threads_in, until

psutil = pytest.importorskip("psutil")
ONCE = 10**6
"""Samples that no test waits for: what is reported then comes from ``off()``."""


class Machine:
    """A profiler of its own, and what it has reported."""

    def __init__(self, local_rank: int = 0) -> None:
        ranks: Any = SimpleNamespace(local_rank=local_rank)
        self.rows: list[tuple[str, int | None, Mapping[str, Any]]] = []
        self.profiler = core.ProfilerContext(ranks, lambda *row: self.rows.append(row), "agent")

    def values(self, group: str) -> list[dict[str, Any]]:
        return [metrics["agent"] for name, _, metrics in self.rows if name == group]


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.profiler.close()


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "det_core-profiler"]


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError("sensor unplugged")


def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> itertools.count[int]:
    """Free memory of 1, 2, 3, … bytes; gives the next number."""
    numbers = itertools.count(1)
    monkeypatch.setattr("det_core.core._profiler.CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=next(numbers)))
    return numbers


def test_profiler_reports_the_groups_of_the_contract(machine: Machine) -> None:
    machine.profiler.on(0.1, 3)
    until(lambda: len(machine.values("network")) >= 2)
    machine.profiler.off()
    assert all(steps is None and list(metrics) == ["agent"] for _, steps, metrics in machine.rows)
    assert {group for group, _, _ in machine.rows} >= {"cpu", "memory", "disk", "network"}
    assert set(machine.values("cpu")[-1]) == {"cpu_util_simple"}
    assert all(0 <= row["cpu_util_simple"] <= 100 for row in machine.values("cpu"))
    assert 0 < machine.values("memory")[0]["memory_free"] <= psutil.virtual_memory().total
    assert set(machine.values("network")[0]) == {"net_throughput_sent", "net_throughput_recv"}
    assert 0 < machine.values("disk")[0]["/"]["disk_util"] <= 100
    if psutil.disk_io_counters() is not None:
        assert {"disk_iops", "disk_throughput_read", "disk_throughput_write"} < set(machine.values("disk")[0])


def test_profiler_report_is_the_mean_of_samples(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, tmp_path)
    machine.profiler.on(0.1, 4)
    until(lambda: len(machine.values("memory")) >= 2)
    machine.profiler.off()
    assert machine.values("memory")[:2] == [{"memory_free": 2.5}, {"memory_free": 6.5}]


def test_off_reports_last_samples_and_nothing_after(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = counted(monkeypatch, tmp_path)
    machine.profiler.on(0.1, ONCE)
    until(lambda: next(numbers) >= 20)
    machine.profiler.off()
    assert len(machine.values("memory")) == 1 and not sampling_threads()
    assert all(len(machine.values(group)) == 1 for group, _, _ in machine.rows)


def test_off_does_not_wait_for_the_next_sample(machine: Machine) -> None:
    machine.profiler.on(3600)
    machine.profiler.off()
    assert not sampling_threads()


def test_on_and_off_are_idempotent(machine: Machine) -> None:
    profiler = machine.profiler
    profiler.off()
    profiler.on(0.1, ONCE)
    profiler.on(5)
    assert len(sampling_threads()) == 1
    profiler.off()
    profiler.off()
    profiler.on(0.1, ONCE)
    assert len(sampling_threads()) == 1
    profiler.close()
    profiler.close()
    assert not sampling_threads()
    with pytest.raises(ContextClosed, match="profiler"):
        profiler.on()


def test_failing_sensor_is_omitted_and_others_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, core.init(name="watched") as ctx:
        patch.setattr(psutil, "net_io_counters", refuse)
        ctx.profiler.on(0.1, 1)
        until(lambda: len(list(client.run(ctx.run_id).rows("memory"))) >= 4)
        ctx.profiler.on()
        assert not list(client.run(ctx.run_id).rows("network"))
        patch.undo()
        until(lambda: list(client.run(ctx.run_id).rows("network")))
        patch.setattr(psutil, "net_io_counters", refuse)
        until(lambda: caplog.text.count("sensor unplugged") >= 2)
    assert client.run("latest").state == "completed"
    assert caplog.text.count("omitting network, which fails: OSError: sensor unplugged") == 2, "once for each trouble"
    assert not sampling_threads()


def test_rejected_report_does_not_fail_the_run(caplog: pytest.LogCaptureFixture) -> None:
    ranks: Any = SimpleNamespace(local_rank=0)
    profiler = core.ProfilerContext(ranks, refuse, "agent")
    profiler.on(0.1, 1)
    until(lambda: "omitting the report of memory" in caplog.text)
    profiler.off()


def test_off_with_hanging_sensor_returns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("det_core.core._profiler.STOP_TIMEOUT", 0.2)
    release = threading.Event()

    def hang() -> None:
        release.wait()

    monkeypatch.setattr(psutil, "net_io_counters", hang)
    machine.profiler.on(0.1, ONCE)
    until(lambda: threads_in("hang"))
    machine.profiler.off()
    assert "abandoning network: no answer" in caplog.text
    release.set()
    for thread in sampling_threads():
        thread.join()
    assert machine.rows == [], "off() had returned"


def test_on_samples_on_local_rank_0_only() -> None:
    machine = Machine(local_rank=1)
    machine.profiler.on(0.1, 1)
    assert not sampling_threads()
    with pytest.raises(ValueError, match="sampling_interval"):
        machine.profiler.on(0.01)
    machine.profiler.off()
    machine.profiler.close()
    assert not machine.rows


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
def test_on_invalid_arguments_are_rejected(
    machine: Machine, arguments: dict[str, Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        machine.profiler.on(**arguments)
    assert not sampling_threads()


def test_on_without_psutil_names_install_command(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[profiler\]'"):
        machine.profiler.on()


def burn() -> None:
    while True:
        pass


def test_cpu_utilization_of_busy_process_rises(machine: Machine) -> None:
    child = multiprocessing.get_context("fork").Process(target=burn)
    child.start()
    try:
        machine.profiler.on(0.1, 2)
        least = 0.3 * 100 / len(os.sched_getaffinity(0))
        until(lambda: any(least < row["cpu_util_simple"] <= 100 for row in machine.values("cpu")))
    finally:
        child.kill()
        child.join()


def test_cpu_utilization_counts_allowed_processors(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [100.0, 20.0, 100.0, 40.0])
    machine.profiler.on(0.1, 2)
    until(lambda: machine.values("cpu"))
    assert machine.values("cpu")[0] == {"cpu_util_simple": 30.0}


@pytest.mark.parametrize(
    ("limit", "free"),
    [("max", 250), ("1000", 250), ("900", 200), ("600", 0)],
)
def test_free_memory_is_limited_by_control_group(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: int
) -> None:
    files = {"memory.max": limit, "memory.current": "800", "memory.stat": "anon 700\ninactive_file 100"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr("det_core.core._profiler.CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=250))
    machine.profiler.on(0.1, 1)
    until(lambda: machine.values("memory"))
    assert machine.values("memory")[0] == {"memory_free": free}


def test_network_counts_loopback_bytes(machine: Machine) -> None:
    machine.profiler.on(0.1, 1)
    until(lambda: machine.values("network"))
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
    for direction in ("net_throughput_sent", "net_throughput_recv"):  # all within a second, on any machine
        until(lambda direction=direction: max(row.get(direction, 0) for row in machine.values("network")) > 1 << 20)


def test_rates_ignore_counters_that_went_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = iter([10, 20, 5, 5])
    counters = (SimpleNamespace(bytes_sent=next(sent, 5), bytes_recv=n) for n in itertools.count(0, 100))
    monkeypatch.setattr(psutil, "net_io_counters", lambda: next(counters))
    machine.profiler.on(0.1, 1)
    until(lambda: len(machine.values("network")) >= 3)
    first, back, still = machine.values("network")[:3]
    assert first["net_throughput_sent"] > 0 and first["net_throughput_recv"] > 0
    assert set(back) == {"net_throughput_recv"} and still["net_throughput_sent"] == 0


def test_disk_without_counters_reports_usage(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    machine.profiler.on(0.1, 2)
    until(lambda: machine.values("disk"))
    assert set(machine.values("disk")[0]) <= {"/", "/determined_shared_fs"}
    assert not machine.values("network")


def test_context_journals_profiler_reports() -> None:
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
