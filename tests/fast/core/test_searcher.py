from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from det_core.journal import read_run
from support.threads import as_ranks


def _run_folder(home: Path) -> Path:
    (folder,) = (home / "runs").iterdir()
    return folder


def test_operations_in_bare_run_is_one_of_max_length(home: Path) -> None:
    with core.init(max_length={"epochs": 3}) as ctx:
        lengths = []
        for op in ctx.searcher.operations():
            lengths.append(op.length)
            op.report_progress(1.5)
            op.report_completed(0.25)
        assert lengths == [3]
        assert ctx.searcher.get_configured_units() is core.Unit.EPOCHS
    run = read_run(_run_folder(home))
    assert [r["searcher_metric"] for r in run.records("operation")] == [0.25]
    assert [r["units"] for r in run.records("progress")] == [1.5]
    assert len(run.records("out_of_operations")) == 1


def test_operations_without_max_length_has_length_1(caplog: pytest.LogCaptureFixture) -> None:
    with core.init() as ctx:
        assert [op.length for op in _completing(ctx)] == [1]
        assert ctx.searcher.get_configured_units() is None
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "operations() gives one operation of length 1: core.init(max_length=) says how long to train"
    ]
    caplog.clear()
    with core.init(max_length=1) as ctx:
        assert [op.length for op in _completing(ctx)] == [1]
    assert not any(r.levelname == "WARNING" for r in caplog.records)


def _completing(ctx: core.Context) -> list[core.SearcherOperation]:
    seen = []
    for op in ctx.searcher.operations():
        op.report_completed(1.0)
        seen.append(op)
    return seen


def test_operations_after_resume_omits_completed_one() -> None:
    with core.init(max_length=2, name="n") as ctx:
        assert len(_completing(ctx)) == 1
    with core.init(max_length=2, name="n", resume="latest") as ctx:
        assert _completing(ctx) == []
    with core.init(max_length=5, name="n", resume="latest") as ctx:
        assert [op.length for op in _completing(ctx)] == [5]


def test_run_killed_before_it_completed_its_operation_completes_it_by_the_record() -> None:
    with core.init(max_length=2, name="n", searcher_metric="loss") as ctx:
        for step, loss in enumerate((0.5, 0.25), 1):
            ctx.train.report_validation_metrics(step, {"loss": loss, "other": 9.0})
    with core.init(max_length=2, name="n", searcher_metric="loss", resume="latest") as ctx:
        for op in ctx.searcher.operations():
            op.report_completed()
            assert op.completed
    run = client.run("latest")
    assert [r["searcher_metric"] for r in run.record.records("operation")] == [0.25]
    with core.init(max_length=2, name="n", searcher_metric="loss", resume="latest") as ctx:
        assert list(ctx.searcher.operations()) == []


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (None, "none is named: pass core.init\\(searcher_metric=\\)"),
        ("loss", "searcher metric 'loss' missing"),
    ],
)
def test_operation_completed_by_a_record_without_the_metric_is_an_error(metric: str | None, said: str) -> None:
    with core.init(searcher_metric=metric) as ctx:
        op = next(ctx.searcher.operations())
        with pytest.raises(RuntimeError, match=said):
            op.report_completed()
        op.report_completed(1.0)


def test_operations_advanced_before_completion_raises() -> None:
    with core.init() as ctx:
        operations = ctx.searcher.operations()
        next(operations)
        with pytest.raises(RuntimeError, match="before report_completed"):
            next(operations)


def test_operations_left_by_break_is_allowed() -> None:
    with core.init(max_length=2) as ctx:
        for _ in ctx.searcher.operations():
            break


def test_operation_invalid_order_or_value_raises() -> None:
    with core.init() as ctx:
        op = next(ctx.searcher.operations())
        for bad in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="length is"):
                op.report_progress(bad)
        with pytest.raises(TypeError, match="searcher_metric must be a number, not str"):
            op.report_completed("good")
        op.report_completed(1)
        with pytest.raises(RuntimeError, match="twice"):
            op.report_completed(1)
        op.report_progress(op.length)
        with pytest.raises(RuntimeError, match="after report_completed"):
            op.report_progress(0)
        with pytest.raises(TypeError, match="SearcherMode"):
            ctx.searcher.operations("CHEIF_ONLY")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", {"epochs": 1, "batches": 2}, {"steps": 1}, {"epochs": 1.5}, {}])
def test_init_invalid_max_length_is_rejected(home: Path, bad: object) -> None:
    with pytest.raises((TypeError, ValueError), match="max_length="):
        core.init(max_length=bad)  # type: ignore[arg-type]
    assert not home.exists(), "refused before anything is made"


def test_operations_on_all_ranks_are_equal() -> None:
    def rank(distributed: core.DistributedContext) -> list[int]:
        lengths = []
        with core.init(distributed=distributed, max_length=4) as ctx:
            for op in ctx.searcher.operations():
                lengths.append(op.length)
                if distributed.rank == 0:
                    op.report_completed(0.5)
                else:
                    with pytest.raises(RuntimeError, match="only be called on the chief"):
                        op.report_completed(0.5)
        return lengths

    assert as_ranks(3, rank) == [[4], [4], [4]]


def test_operations_chief_only_raises_on_worker() -> None:
    done = threading.Event()

    def rank(distributed: core.DistributedContext) -> int:
        with core.init(distributed=distributed) as ctx:
            if distributed.rank:
                with pytest.raises(RuntimeError, match="ChiefOnly"):
                    ctx.searcher.operations(core.SearcherMode.ChiefOnly)
                done.wait()
                return 0
            count = 0
            for op in ctx.searcher.operations(core.SearcherMode.ChiefOnly):
                op.report_completed(1.0)
                count += 1
            done.set()
            return count

    assert as_ranks(2, rank) == [1, 0]


def test_operations_after_close_raises() -> None:
    ctx = core.init()
    operations = ctx.searcher.operations()
    ctx.close()
    for call in (lambda: next(operations), ctx.searcher.operations, ctx.searcher.acknowledge_out_of_ops):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("length", "default", "units"),
    [({"batches": 5}, None, 1), ({"records": 5}, None, 32), ({"epochs": 5}, None, None), (5, core.Unit.BATCHES, 1),
     ({"epochs": 5}, core.Unit.BATCHES, None)],
)  # fmt: skip
def test_units_per_batch_returns_unit_count(length: Any, default: Any, units: int | None) -> None:
    with core.init(max_length=length) as ctx:
        assert ctx.searcher.units_per_batch(32, default) == units


def test_units_per_batch_unknown_raises() -> None:
    with core.init(max_length=5) as ctx, pytest.raises(ValueError, match="max_length has no unit"):
        ctx.searcher.units_per_batch(32)
    with core.init(max_length={"records": 5}) as ctx, pytest.raises(ValueError, match="needs a known batch size"):
        ctx.searcher.units_per_batch(None)


def test_metric_of_returns_searcher_metric() -> None:
    np = pytest.importorskip("numpy")
    with core.init(searcher_metric="error") as ctx:
        metric_of = ctx.searcher.metric_of
        assert metric_of({"error": np.float32(0.5), "a": 1}) == 0.5
        with pytest.raises(RuntimeError, match="searcher metric 'error' missing; reported validation metrics: a, b"):
            metric_of({"b": 1, "a": 2})
        for wrong in (None, True, [1.0], np.zeros(2), "0.5"):
            with pytest.raises(RuntimeError, match=r"'error' is .*: the searcher metric must be a number"):
                metric_of({"error": wrong})
