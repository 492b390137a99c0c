"""The context that is open, and what it says of the run, bare and in a trial."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from det_core import client, core
from det_core.errors import ContextClosed
from support.ours import config, opened
from support.ranks import running
from support.running_master import Running
from support.threads import as_ranks


def test_current_context_finds_open_one_not_closed_one() -> None:
    assert core.current_context() is None
    with core.init() as ctx:
        assert core.current_context() is ctx
    assert core.current_context() is None
    made = core.init()
    assert core.current_context() is made, "also without a with"
    made.close()
    assert core.current_context() is None


def test_current_context_nested_returns_innermost() -> None:
    with core.init() as outer:
        with core.init() as inner:
            assert core.current_context() is inner
        assert core.current_context() is outer
        with core.init() as closed:
            closed.close()
            assert core.current_context() is outer


def test_current_context_in_thread_returns_the_only_one() -> None:
    found: list[core.Context | None] = []
    with core.init() as ctx:
        thread = threading.Thread(target=lambda: found.append(core.current_context()))
        thread.start()
        thread.join()
    assert found == [ctx]


def test_current_context_with_several_ranks_in_threads_returns_own() -> None:
    everybody_is_in = threading.Barrier(3)

    def rank(distributed: core.DistributedContext) -> bool:
        with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
            everybody_is_in.wait()
            own = core.current_context() is ctx
            everybody_is_in.wait()
        return own

    refused: list[str] = []

    def outsider() -> None:
        everybody_is_in.wait()
        with pytest.raises(RuntimeError, match=r"2 contexts are open .*core_context=") as e:
            core.current_context()
        refused.append(str(e.value))
        everybody_is_in.wait()

    thread = threading.Thread(target=outsider)
    thread.start()
    assert as_ranks(2, rank) == [True, True]
    thread.join()
    assert refused


def save(ctx: core.Context, steps: int) -> str:
    with ctx.checkpoint.store_path({"steps_completed": steps}) as (path, storage_id):
        (path / "f").write_text(str(steps))
    return storage_id


def test_context_of_bare_run_has_its_state() -> None:
    with core.init(name="mine", searcher_metric="loss", smaller_is_better=False) as ctx:
        assert (ctx.managed, ctx.hparams, ctx.config) == (False, {}, None)
        assert (ctx.searcher.metric, ctx.searcher.smaller_is_better) == ("loss", False)
        assert (ctx.steps_completed, ctx.last_validation) == (0, None)
        ctx.train.report_validation_metrics(4, {"loss": 1.0})
        save(ctx, 5)
        ctx.train.report_validation_metrics(8, {"loss": 3.0})
        assert ctx.last_validation == 8
        assert ctx.train.get_experiment_best_validation() == 3.0
    with core.init(name="mine", resume="latest", searcher_metric="loss") as ctx:
        assert (ctx.steps_completed, ctx.last_validation) == (5, 8)
        assert (ctx.searcher.metric, ctx.searcher.smaller_is_better) == ("loss", True)
        with ctx.checkpoint.resume() as path:
            assert path is not None and (path / "f").read_text() == "5"
        assert ctx.last_validation == 4, "what came after the restored checkpoint does not stand any more"
        save(ctx, 7)
        assert ctx.steps_completed == 5, "where this process started"
    with core.init(name="another") as ctx:
        assert ctx.searcher.metric is None and ctx.steps_completed == 0
    with pytest.raises(ContextClosed, match="closed"):
        _ = ctx.last_validation


def test_init_empty_searcher_metric_is_rejected() -> None:
    with pytest.raises(ValueError, match="searcher_metric=''"):
        core.init(searcher_metric="")


def test_context_of_trial_has_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    master = Running(tmp_path / "home", 100 << 20)
    try:
        text = config(tmp_path) + "hyperparameters: {lr: 0.5}\n"
        spec = replace(master.a_trial(text), master_url=master.url)
        with opened(spec, tmp_path, monkeypatch) as ctx:
            assert ctx.managed and ctx.hparams == {"lr": 0.5}
            assert ctx.config is not None and ctx.config["name"] == "test"
            assert ctx.info is not None and ctx.info.trial.config is ctx.config
            assert (ctx.searcher.metric, ctx.searcher.smaller_is_better) == ("loss", True)
            assert (ctx.steps_completed, ctx.last_validation) == (0, None)
            with ctx.checkpoint.resume() as path:
                assert path is None
            ctx.train.report_validation_metrics(2, {"loss": 2.0})
            before = save(ctx, 2)
            ctx.train.report_validation_metrics(4, {"loss": 1.0})
            storage_id = save(ctx, 4)
            assert ctx.last_validation == 4
            assert master.ask("POST", f"experiments/{spec.experiment_id}/pause").status == 200
            while not ctx.preempt.should_preempt():
                pass
        master.end(spec.allocation_id)
        master.until(spec.experiment_id, "STATE_PAUSED")
        master.ask("POST", f"experiments/{spec.experiment_id}/activate")
        again = replace(master.launched(spec.experiment_id)[0], master_url=master.url)
        with opened(again, tmp_path, monkeypatch) as ctx:
            assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (storage_id, 4, 4)
            for _ in range(2):
                with ctx.checkpoint.resume() as path:
                    assert path is not None and (path / "f").read_text() == "4"
        shutil.rmtree(tmp_path / "store" / storage_id)
        with opened(again, tmp_path, monkeypatch) as ctx:
            assert (ctx.latest_checkpoint, ctx.steps_completed, ctx.last_validation) == (before, 2, 2)
            assert ctx.info is not None and ctx.info.latest_checkpoint == before
    finally:
        master.close()


def test_report_equal_metrics_again_after_resume_is_accepted() -> None:
    rows = [{"loss": 0.5}, {"loss": 0.25}]
    with core.init(name="mine") as ctx:
        for step in range(1, 7):
            ctx.train.report_training_metrics(step, {"loss": 1 / step}, rows)
            ctx.train.report_validation_metrics(step, {"loss": 1 / step, "by class": [0.1, float("nan")]})
            if step == 3:
                save(ctx, step)
    for _ in range(2):
        with core.init(name="mine", resume="latest") as ctx:
            for step in range(ctx.steps_completed + 1, 7):  # the same once more, and again in this process
                for _ in range(2):
                    ctx.train.report_training_metrics(step, {"loss": 1 / step}, rows)
                    ctx.train.report_validation_metrics(step, {"loss": 1 / step, "by class": [0.1, float("nan")]})
    for group in ("training", "validation"):
        found = client.run(ctx.run_id).metrics(group)
        assert [row["steps_completed"] for row in found.to_dict("records")] == [1, 2, 3, 4, 5, 6]


RESUMED = """
    import sys
    from det_core import core

    distributed = core.DistributedContext.detect()
    with core.init(distributed=distributed, name="ranks", resume="latest") as ctx:
        for _ in range(2):
            with ctx.checkpoint.resume() as path:
                found = None if path is None else (path / "f").read_text()
                print("found", found, ctx.steps_completed, flush=True)
        with ctx.checkpoint.store_path({"steps_completed": ctx.steps_completed + 3}, shard=True) as (path, _):
            if distributed.rank == 1:
                (path / "f").write_text("from rank 1")
"""


def test_resume_gives_every_rank_the_checkpoint(tmp_path: Path) -> None:
    for expected in ("found None 0", "found from rank 1 3"):
        with running(RESUMED, 2, tmp_path) as ranks:
            assert ranks.wait() == [0, 0], ranks.output(0)
        assert [ranks.output(rank).count(expected) for rank in range(2)] == [2, 2]
        for script in tmp_path.glob("script-*.py"):
            script.unlink()
