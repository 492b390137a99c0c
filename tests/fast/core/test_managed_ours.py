"""A context under our own master: it gets the journal as it is, and each question by its own route."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from det_core import InvalidHP, core
from det_core.backend._sync import sync_run
from det_core.errors import MasterError
from support.ours import config, opened
from support.processes import until
from support.proxy import BUSY, LOST, RESET, TRUNCATED, Request, proxy_before
from support.running_master import TOKEN, Running
from support.scripted_engine import Launched


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "home").mkdir(exist_ok=True)
    running = Running(tmp_path / "home", 100 << 20)
    try:
        yield running
    finally:
        running.close()


def launched(master: Running, folder: Path, length: int = 6) -> Launched:
    spec = master.a_trial(config(folder, length))
    return replace(spec, master_url=master.url)


def train(ctx: core.Context) -> list[str]:
    step, made = 0, []
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            ctx.train.report_training_metrics(step, {"loss": 1 / step, "odd": float("inf")}, [{"b": 1.0}])
            op.report_progress(step)
            if step % 3 == 0:
                ctx.train.report_validation_metrics(step, {"loss": 1 / step})
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, storage_id):
                    (path / "f").write_text("f")
                made.append(storage_id)
        op.report_completed(1 / step)
    return made


def rows(master: Running, trial_id: int, group: str) -> list[dict[str, object]]:
    answer = master.ask("GET", f"trials/metrics/trial_metrics?trialIds={trial_id}&group={group}")
    return [row for part in answer.lines for row in part["metrics"]]


def check(master: Running, spec: Launched, made: list[str]) -> None:
    training = rows(master, spec.trial_id, "training")
    assert [r["totalBatches"] for r in training] == [1, 2, 3, 4, 5, 6]
    assert [r["totalBatches"] for r in rows(master, spec.trial_id, "validation")] == [3, 6]
    found = master.ask("GET", f"trials/{spec.trial_id}/checkpoints").json["checkpoints"]
    assert sorted(c["uuid"] for c in found) == sorted(made)
    trial = master.ask("GET", f"trials/{spec.trial_id}").json["trial"]
    assert trial["totalBatchesProcessed"] == 6


def test_trial_under_our_master_completes(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path)
    with opened(spec, tmp_path, monkeypatch) as ctx:
        assert ctx.train.get_experiment_best_validation() is None
        made = train(ctx)
        assert ctx.train.get_experiment_best_validation() == pytest.approx(1 / 6)
        assert ctx.train.set_metadata({"a": 1}) == ctx.train.get_metadata() == {"a": 1}
        assert ctx.checkpoint.get_metadata(made[0])["steps_completed"] == 3
        ctx.train.set_status("done")
        ctx.alert("look", level="info")
    check(master, spec, made)
    master.end(spec.allocation_id)
    assert master.until(spec.experiment_id, "STATE_COMPLETED")["state"] == "STATE_COMPLETED"


def test_network_faults_neither_lose_nor_repeat_reports(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = launched(master, tmp_path)
    faults = (LOST, RESET, BUSY, TRUNCATED)

    def plan(number: int, request: Request) -> str | None:
        return faults[number // 2 % len(faults)] if number % 2 == 0 else None

    with proxy_before(master.url) as proxy:
        proxy.begin(plan)
        with opened(replace(spec, master_url=proxy.url), tmp_path, monkeypatch) as ctx:
            made = train(ctx)
    check(master, spec, made)


def test_trial_paused_resumes(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path)
    with opened(spec, tmp_path, monkeypatch) as ctx:
        assert not ctx.preempt.should_preempt()
        ctx.train.report_training_metrics(2, {"loss": 0.5})
        with ctx.checkpoint.store_path({"steps_completed": 2}) as (path, storage_id):
            (path / "f").write_text("f")
        assert master.ask("POST", f"experiments/{spec.experiment_id}/pause").status == 200
        until(ctx.preempt.should_preempt)
    master.end(spec.allocation_id, 1)  # acknowledged: no failure
    master.until(spec.experiment_id, "STATE_PAUSED")
    assert master.ask("POST", f"experiments/{spec.experiment_id}/activate").status == 200
    again = replace(master.launched(spec.experiment_id)[0], master_url=master.url)
    assert (again.trial_run_id, again.latest_checkpoint) == (2, storage_id)
    with opened(again, tmp_path, monkeypatch) as ctx:
        assert ctx.latest_checkpoint == storage_id
        with ctx.checkpoint.restore_path(storage_id):
            made = train(ctx)
    check(master, spec, [storage_id, *made])


def test_zombie_is_rejected(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path)
    with opened(spec, tmp_path, monkeypatch) as ctx:
        ctx.train.get_metadata()
        master.end(spec.allocation_id, 0)
        master.until(spec.experiment_id, "STATE_COMPLETED")
        ctx.train.report_training_metrics(1, {"loss": 1})
        with pytest.raises(MasterError):
            ctx.train.set_metadata({"zombie": True})
    assert rows(master, spec.trial_id, "training") == []


def test_invalid_hp_ends_the_trial(master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = launched(master, tmp_path)
    with pytest.raises(SystemExit):
        with opened(spec, tmp_path, monkeypatch) as ctx:
            ctx.train.report_training_metrics(1, {"loss": 1})
            raise InvalidHP("no")
    master.end(spec.allocation_id, 0)
    master.until(spec.experiment_id, "STATE_COMPLETED")
    assert len(rows(master, spec.trial_id, "training")) == 1


def test_reports_that_a_trial_could_not_ship_are_synced(
    master: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = launched(master, tmp_path)
    with proxy_before(master.url) as proxy:
        env = {"DET_CORE_SHIP_TIMEOUT": "0.3"}
        with opened(replace(spec, master_url=proxy.url), tmp_path, monkeypatch, env) as ctx:
            ctx.train.report_training_metrics(1, {"loss": 1})
            ctx.train.get_metadata()
            proxy.begin(lambda number, request: RESET)
            ctx.train.report_training_metrics(2, {"loss": 2})
    assert [row["totalBatches"] for row in rows(master, spec.trial_id, "training")] == [1]
    folder = tmp_path / f"journal-{spec.trial_run_id}"
    done = sync_run(folder, master.url, TOKEN)
    assert (done.trial_id, done.state, done.refused) == (spec.trial_id, "", ())
    assert [row["totalBatches"] for row in rows(master, spec.trial_id, "training")] == [1, 2]
    assert sync_run(folder, master.url, TOKEN).records == 0


def test_bare_run_is_synced_once(master: Running, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL, max_length=6) as ctx:
        made = train(ctx)
        ctx.train.set_metadata({"a": 1})
    folder = home / "runs" / ctx.run_id
    done = sync_run(folder, master.url, TOKEN)
    assert done.refused == () and done.records > 10
    again = sync_run(folder, master.url, TOKEN)
    assert (again.trial_id, again.records) == (done.trial_id, 0)
    trial = master.ask("GET", f"trials/{done.trial_id}").json["trial"]
    assert trial["state"] == "STATE_COMPLETED" and trial["totalBatchesProcessed"] == 6
    assert [r["totalBatches"] for r in rows(master, done.trial_id, "training")] == [1, 2, 3, 4, 5, 6]
    found = master.ask("GET", f"trials/{done.trial_id}/checkpoints").json["checkpoints"]
    assert sorted(c["uuid"] for c in found) == sorted(made)
    assert master.ask("GET", f"runs/{done.trial_id}/metadata").json["metadata"] == {"a": 1}
