"""The SDK in real processes under foreign masters, over networks that do what networks do."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.foreign_master import ForeignMaster, Trial, foreign_master
from support.managed import BEGIN, TRAIN, processes
from support.proxy import BUSY, LOST, RESET, SLOW, TRUNCATED, Plan, Request, proxy_before
from support.ranks import Ranks

MIDDLE, NEW = "0.37.0", "0.38.1"
LENGTHS = (5, 10)


def check(master: ForeignMaster, trial: Trial, size: int) -> None:
    """Nothing was lost, doubled or brought out of order."""
    steps = list(range(1, LENGTHS[-1] + 1))
    for group in ("training", *(f"rank{rank}" for rank in range(size))):
        assert [r["steps"] for r in trial.rows if r["group"] == group] == steps, group
    assert [r["steps"] for r in trial.rows if r["group"] == "validation"] == [5, 10]
    checkpoints = list(master.checkpoints.values())
    assert [c["metadata"]["steps_completed"] for c in checkpoints] == [5, 10]
    assert all({f"model-{rank}" for rank in range(size)} <= set(c["resources"]) for c in checkpoints)
    seen = [a for a in master.seen if a.method == "POST"]
    for checkpoint in checkpoints:
        step = checkpoint["metadata"]["steps_completed"]
        before = seen[: next(i for i, a in enumerate(seen) if (a.body or {}).get("uuid") == checkpoint["uuid"])]
        groups = [a.body["group"] for a in before if _step(a.body) == step]
        assert {"training", "validation"} <= set(groups), "a checkpoint came before the metrics of its step"
    if master.release < (0, 38):
        assert trial.completed == [(5, 0.2), (10, 0.1)]
        assert set(master.acks) == {trial.allocation_id}


def _step(body: Any) -> int | None:
    return body["metrics"].get("stepsCompleted") if isinstance(body, dict) and "group" in body else None


def ended(ranks: Ranks, size: int) -> None:
    assert ranks.wait() == [0] * size, "\n".join(ranks.output(rank)[-3000:] for rank in range(size))


@pytest.mark.parametrize(("version", "size"), [(MIDDLE, 1), (NEW, 4)])
def test_trial_on_one_and_four_ranks_completes(version: str, size: int, tmp_path: Path) -> None:
    with foreign_master(version) as master:
        trial = master.add_trial(lengths=LENGTHS)
        with processes(master, trial, tmp_path, size=size) as ranks:
            ended(ranks, size)
        check(master, trial, size)
        starts = [a for a in master.seen if a.path == "/api/v1/runs/start"]
        assert len(starts) == 1 and starts[0].body["checkpointStorage"]["type"] == "directory"


def every(nth: int, faults: tuple[str, ...]) -> Plan:
    """Each ``nth`` request meets the next fault."""

    def plan(number: int, request: Request) -> str | None:
        return faults[number // nth % len(faults)] if number % nth == 0 else None

    return plan


def gone(first: int, seconds: float) -> Plan:
    """From a request on, for some seconds, every one is reset."""
    began: list[float] = []

    def plan(number: int, request: Request) -> str | None:
        if number >= first:
            began.append(time.monotonic())
        return RESET if began and time.monotonic() - began[0] < seconds else None

    return plan


def under_faults(version: str, size: int, folder: Path, plan: Plan) -> None:
    with foreign_master(version) as master, proxy_before(master.url) as proxy:
        trial = master.add_trial(lengths=LENGTHS)
        proxy.begin(plan)
        with processes(master, trial, folder, size=size, url=proxy.url) as ranks:
            ended(ranks, size)
        check(master, trial, size)


def test_network_faults_neither_lose_nor_repeat_reports(tmp_path: Path) -> None:
    under_faults(MIDDLE, 1, tmp_path, every(3, (LOST, RESET, BUSY, TRUNCATED, SLOW)))


def test_master_unreachable_for_a_while_loses_no_report(tmp_path: Path) -> None:
    under_faults(NEW, 1, tmp_path, gone(8, 1.0))


PREEMPT = (
    BEGIN
    + """
mode = core.PreemptMode[sys.argv[1]]
with core.init(distributed=distributed, preempt_mode=mode, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    rank, calls, stop = ctx.distributed.rank, 0, False
    print("begun", flush=True)
    while not stop:
        calls += 1
        if mode is not core.PreemptMode.ChiefOnly or rank == 0:
            stop = ctx.preempt.should_preempt()
        if mode is core.PreemptMode.ChiefOnly:
            stop = ctx.distributed.broadcast(stop)
        time.sleep(0.002)
    if mode is core.PreemptMode.WorkersAskChief:
        assert len(set(ctx.distributed.allgather(calls))) == 1
    with ctx.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
        (path / f"{rank}").write_text("saved")
"""
)


@pytest.mark.parametrize("mode", ["WorkersAskChief", "ChiefOnly", "WorkersAskMaster"])
def test_masters_preemption_stops_all_ranks(mode: str, tmp_path: Path) -> None:
    with foreign_master(MIDDLE) as master:
        trial = master.add_trial()
        size = 2
        script = PREEMPT.replace("sys.argv[1]", repr(mode))
        with processes(master, trial, tmp_path, script, size) as ranks:
            ranks.wait_for("begun")
            master.preempt(trial)
            ended(ranks, size)
        assert master.acks == [trial.allocation_id] * (size if mode == "WorkersAskMaster" else 1)
        kinds = [a.path.rsplit("/", 1)[1] for a in master.seen if a.method == "POST"]
        assert kinds[-1] == "checkpoints", "the stop reached the master after the checkpoint"


def test_sigterm_ends_process_after_flush(tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    assert not ctx.preempt.should_preempt()
    for step in range(1, 11):
        ctx.train.report_training_metrics(step, {"loss": step})
    print("ready", flush=True)
    while not ctx.preempt.should_preempt():
        time.sleep(0.01)
"""
    )
    with foreign_master(NEW) as master:
        trial = master.add_trial()
        with processes(master, trial, tmp_path, script) as ranks:
            ranks.wait_for("ready")
            ranks.processes[0].send_signal(signal.SIGTERM)
            assert ranks.wait() == [-signal.SIGTERM]
        assert [r["steps"] for r in trial.rows] == list(range(1, 11))
        assert master.acks == []


def test_next_start_ships_reports_of_killed_process(tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    first = int(open("FIRST").read())
    for step in range(first, first + 20):
        ctx.train.report_training_metrics(step, {"loss": step})
    if first == 1:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""
    ).replace("FIRST", str(tmp_path / "first"))
    with foreign_master(NEW) as master:
        trial = master.add_trial()
        env = {"DET_CORE_RUN_DIR": str(tmp_path / "run")}
        (tmp_path / "first").write_text("1")
        with processes(master, trial, tmp_path, script, env=env) as ranks:
            assert ranks.wait() == [-signal.SIGKILL]
        left = [r["steps"] for r in trial.rows]
        (tmp_path / "first").write_text("21")
        trial.run_id -= 1  # the same allocation starts its script again, as torchrun does
        with processes(master, trial, tmp_path, script, env=env) as ranks:
            ended(ranks, 1)
        assert [r["steps"] for r in trial.rows] == list(range(1, 41)), f"after {left}"
        assert json.loads((tmp_path / "run" / "task.json").read_text())["trial_id"] == trial.trial_id


def test_script_of_trial_runs_bare(tmp_path: Path) -> None:
    from support.ranks import running

    with running(TRAIN, 1, tmp_path) as ranks:
        ended(ranks, 1)
        assert "det_core: run " in ranks.output(0) and "the end" in ranks.output(0)
