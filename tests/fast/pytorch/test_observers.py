"""Observers of a training: TensorBoard's scalars and writer, torch's profiler and the core's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorboard")

from det_core import _clock, client, core, pytorch  # noqa: E402
from det_core.pytorch import Batch  # noqa: E402
from support.trials import Tiny, built, fit  # noqa: E402


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


class Watched(Tiny):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.total = context.wrap_reducer(sum, "total")

    def metrics(self, loss: Any, batch_idx: int) -> Any:
        self.total.update(1.0)
        return {"loss": batch_idx / 2, "text": "no number"}


def test_scalars_of_every_batch() -> None:
    found = fit(Watched, 4, reporting_period=Batch(2))
    shown = scalars(found.run.path / "tensorboard" / "rank-0")
    assert shown["Determined/loss"] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert shown["Determined/total"] == [(2, 2.0), (4, 2.0)]
    assert [step for step, _ in shown["Determined/val_loss"]] == [4]
    assert set(shown) == {f"Determined/{name}" for name in ("loss", "total", "val_loss", "val_total")}
    silent = fit(Watched, 2, init={"enable_tensorboard_logging": False})
    assert not list(silent.run.path.glob("tensorboard/**/*tfevents*"))


def test_a_writer_of_the_trials_own(tmp_path: Path) -> None:
    class Writing(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            writer = self.context.get_tensorboard_writer()
            assert writer is self.context.get_tensorboard_writer()
            writer.add_scalar("mine", batch_idx, batch_idx)
            return {"loss": loss}

    found = fit(Writing, 3, init={"checkpoint_storage": tmp_path / "store"}, reporting_period=Batch(1))
    found.trial.context.get_tensorboard_writer().close()
    kept = tmp_path / "store" / "tensorboard" / found.run.run_id
    assert scalars(kept)["mine"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [step for step, _ in scalars(kept)["Determined/val_loss"]] == [3]


def test_boundaries_ship_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shipped = 100.0, []
    ship = core.TrainContext.sync_tensorboard
    monkeypatch.setattr(_clock, "monotonic", lambda: now)
    monkeypatch.setattr(core.TrainContext, "sync_tensorboard", lambda train: (shipped.append(now), ship(train)))

    class Slow(Tiny):
        def metrics(self, loss: Any, batch_idx: int) -> Any:
            nonlocal now
            now += 4.0
            return {"loss": loss}

    fit(Slow, 6, reporting_period=Batch(1))
    assert shipped == [104.0, 116.0, 124.0], "at the first boundary, 10 seconds later at the soonest, and at the end"


def test_the_names_that_trials_of_determined_import() -> None:
    pytest.importorskip("tensorboard")
    import det_core as det
    from det_core.tensorboard.metric_writers.pytorch import TorchWriter

    with pytest.raises(RuntimeError, match="needs an open context"):
        TorchWriter()
    with built() as trial:
        assert isinstance(trial.context, det.TrialContext)
        writer = TorchWriter()
        writer.add_scalar("mine", 0.5, 1)
        writer.reset()
        assert list(trial.context.get_tensorboard_path().glob("events*"))
        writer.writer.close()


def test_torchs_profiler_spans_the_whole_fit() -> None:
    traces: list[int] = []

    class Profiled(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.set_profiler(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
                on_trace_ready=lambda profile: traces.append(profile.step_num),
            )

    fit(Profiled, 6, validation_period=Batch(1))
    assert traces == [4], "its schedule counts batches"


def test_the_cores_profiler() -> None:
    pytest.importorskip("psutil")
    with pytorch.init(hparams={}) as context:
        trial = Tiny(context)
        seen: list[bool] = []
        context.profiler.on = lambda *a, **k: seen.append(True)  # type: ignore[method-assign]
        pytorch.Trainer(trial, context).fit(max_length=Batch(1), profiling_enabled=True)
    assert seen == [True]
    assert client.run(context._core.run_id).state == "completed"
