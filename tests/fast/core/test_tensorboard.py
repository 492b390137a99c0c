"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from det_core import client, core
from det_core.core import _event_writer
from support.processes import until
from support.threads import as_ranks

pytest.importorskip("tensorboard")
FLUSH_TIMEOUT = _event_writer.FLUSH_TIMEOUT  # before conftest.py makes it longer
AUTO, MANUAL = core.TensorboardMode.AUTO, core.TensorboardMode.MANUAL


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every point under each tag, as TensorBoard shows them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def folder_of(ctx: core.Context) -> Path:
    """Return the chief's directory of event files, without creating it."""
    return Path(client.run(ctx.run_id).path, "tensorboard", "rank-0")


def drawn(work: Callable[[core.Context], None]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of a run that TensorBoard shows."""
    with core.init(tensorboard_mode=AUTO) as ctx:
        work(ctx)
    return points(folder_of(ctx))


def drawing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "det_core-tensorboard"]


class Scalarish:
    """As large as a number is, of no dtype, and JSON knows what it says."""

    shape = ()

    def __json__(self) -> float:
        return 1.5


def test_reported_scalars_have_group_tags() -> None:
    def work(ctx: core.Context) -> None:
        ctx.train.report_training_metrics(1, {"loss": 0.5, "epoch": 1})
        ctx.train.report_training_metrics(2, {"loss": 0.25})
        ctx.train.report_validation_metrics(2, {"accuracy": 0.75})
        ctx.train.report_metrics("my group", 2, {"x": -1})

    assert drawn(work) == {
        "training/loss": [(1, 0.5), (2, 0.25)],
        "training/epoch": [(1, 1.0)],
        "validation/accuracy": [(2, 0.75)],
        "my group/x": [(2, -1.0)],
    }


def test_values_other_than_numbers_are_ignored() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    reported = {
        "bool": True,
        "big": 1 << 40,
        "np": numpy.float32(0.5),
        "np int": numpy.int64(7),
        "np 0-d": numpy.array(2.0),
        "torch": torch.tensor(1.5),
        "like a scalar": Scalarish(),
        "nested": {"a": 1.0, "b": {"c": 2}},
        "text": "1.0",
        "NaN": "NaN",
        "np text": numpy.str_("1.0"),
        "none": None,
        "list": [1.0],
        "array": numpy.ones(1),
        "tensor": torch.ones(2),
    }
    assert drawn(lambda ctx: ctx.train.report_metrics("g", 3, reported)) == {
        "g/bool": [(3, 1.0)],
        "g/big": [(3, float(1 << 40))],
        "g/np": [(3, 0.5)],
        "g/np int": [(3, 7.0)],
        "g/np 0-d": [(3, 2.0)],
        "g/torch": [(3, 1.5)],
        "g/like a scalar": [(3, 1.5)],
        "g/nested/a": [(3, 1.0)],
        "g/nested/b/c": [(3, 2.0)],
    }


def test_write_scalars_ignores_other_values() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    given = {
        "int": 1,
        "nested": {"np": numpy.float32(0.5)},
        "torch": torch.tensor(1.5, requires_grad=True),
        "like a scalar": Scalarish(),
        "text": "1.0",
        "complex": numpy.complex64(1),
        "torch complex": torch.tensor(1j),
        "huge": 10**400,
        "time": numpy.datetime64("2026-01-01"),
    }
    found = drawn(lambda ctx: ctx.train.write_scalars(3, given))
    assert found == {"int": [(3, 1.0)], "nested/np": [(3, 0.5)], "torch": [(3, 1.5)]}


def test_nonfinite_numbers_are_written() -> None:
    values = {"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "over": 1e300}
    for write in (
        lambda ctx: ctx.train.report_metrics("g", 1, {"in": values}),
        lambda ctx: ctx.train.write_scalars(1, {f"g/in/{name}": value for name, value in values.items()}),
    ):
        found = {tag: value for tag, [(_, value)] in drawn(write).items()}
        assert math.isnan(found["g/in/nan"])
        assert (found["g/in/inf"], found["g/in/ninf"], found["g/in/over"]) == (math.inf, -math.inf, math.inf)


def test_written_value_is_the_one_at_the_report() -> None:
    torch = pytest.importorskip("torch")
    loss, metrics = torch.tensor(1.0), {"plain": 1.0}

    def work(ctx: core.Context) -> None:
        for step in range(50):
            loss.fill_(step)
            metrics["plain"] = float(step)
            metrics["loss"] = loss
            ctx.train.report_metrics("g", step, metrics)
            ctx.train.write_scalars(step, {"direct": loss})

    assert drawn(work) == {tag: [(i, float(i)) for i in range(50)] for tag in ("g/plain", "g/loss", "direct")}


def test_report_without_number_or_step_creates_no_file() -> None:
    with core.init(tensorboard_mode=AUTO) as ctx:
        assert not drawing_threads(), "before the first report"
        ctx.profiler.on(0.1, 1)
        until(lambda: len(client.run(ctx.run_id).metrics("cpu")))
        ctx.train.report_metrics("g", 4, {"text": "nothing to draw here"})
    assert not list(folder_of(ctx).parent.rglob("*tfevents*"))
    assert not drawing_threads()


def test_points_become_readable_without_close() -> None:
    with core.init(tensorboard_mode=AUTO) as ctx:
        ctx.train.report_training_metrics(1, {"x": 1.0})
        until(lambda: folder_of(ctx).exists() and "training/x" in points(folder_of(ctx)))


def test_write_scalars_from_many_threads_keeps_every_point() -> None:
    def work(ctx: core.Context) -> None:
        def report(name: int) -> None:
            for step in range(300):
                ctx.train.report_metrics(f"g{name}", step, {"m": float(step)})
                ctx.train.write_scalars(step, {f"m{name}": float(step)})

        threads = [threading.Thread(target=report, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    expected = [(step, float(step)) for step in range(300)]
    assert drawn(work) == {tag: expected for i in range(4) for tag in (f"g{i}/m", f"m{i}")}


def test_directory_unavailable_for_a_while_loses_no_point(caplog: pytest.LogCaptureFixture) -> None:
    with core.init(tensorboard_mode=AUTO) as ctx:
        in_the_way = folder_of(ctx).parent
        in_the_way.write_text("a file")
        for step in range(1, 4):
            ctx.train.report_training_metrics(step, {"x": 1.0})
            ctx.train.sync_tensorboard()
        ctx.train.write_scalars(1, {"y": 1.0})
        assert caplog.text.count("cannot write event file in") == 1
        in_the_way.unlink()
        until(lambda: folder_of(ctx).exists() and len(points(folder_of(ctx)).get("training/x", ())) == 3)
        ctx.train.report_training_metrics(4, {"x": 1.0})
    assert points(folder_of(ctx)) == {"training/x": [(step, 1.0) for step in range(1, 5)], "y": [(1, 1.0)]}
    assert "lacks points" not in caplog.text


def test_directory_never_available_does_not_fail_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with core.init(tensorboard_mode=AUTO) as ctx:
        folder_of(ctx).parent.write_text("a file")
        ctx.train.report_training_metrics(1, {"x": 1.0})
    run = client.run(ctx.run_id)
    assert run.state == "completed" and len(list(run.rows("training"))) == 1
    assert "lacks points; the journal has all metrics: NotADirectoryError" in caplog.text


@pytest.mark.parametrize("what", ["file", "folder"])
def test_deleted_event_file_is_rewritten_from_journal(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with core.init(tensorboard_mode=AUTO) as ctx:
        for step in range(1, 4):
            ctx.train.report_training_metrics(step, {"x": 1.0})
        ctx.train.sync_tensorboard()
        (file,) = folder_of(ctx).iterdir()
        if what == "file":
            file.unlink()
        else:
            shutil.rmtree(folder_of(ctx).parent)
        ctx.train.report_training_metrics(4, {"x": 1.0})
    assert list(folder_of(ctx).iterdir()) == [file]
    assert points(folder_of(ctx)) == {"training/x": [(step, 1.0) for step in range(1, 5)]}
    assert caplog.text.count("was deleted; writing it again") == 1


def test_close_with_hanging_disk_returns_after_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from det_core.core import _event_file

    released = threading.Event()
    monkeypatch.setattr(_event_file.EventFile, "flush", lambda self: released.wait())
    assert FLUSH_TIMEOUT == 5.0
    monkeypatch.setattr(_event_writer, "FLUSH_TIMEOUT", 0.2)
    with core.init(tensorboard_mode=AUTO) as ctx:
        ctx.train.report_training_metrics(1, {"x": 1.0})
        ctx.train.sync_tensorboard()
    assert client.run(ctx.run_id).state == "completed"
    assert "lacks points; the journal has all metrics: not written within" in caplog.text
    released.set()
    for thread in drawing_threads():
        thread.join()


def test_write_scalars_with_full_queue_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("det_core.core._event_writer.MAX_QUEUED_CALLS", 10)
    monkeypatch.setattr("det_core.core._event_writer.POLL_INTERVAL", 3600.0)
    with caplog.at_level(logging.WARNING, "det_core.core"), core.init(tensorboard_mode=MANUAL) as ctx:
        for step in range(30):
            ctx.train.write_scalars(step, {"x": 1.0})
    assert [step for step, _ in points(folder_of(ctx))["x"]] == [*range(10)]
    assert caplog.text.count("dropping write_scalars() calls") == 1
    assert "dropped 20 write_scalars() calls" in caplog.text


def test_forked_process_does_not_write_the_event_file() -> None:
    with core.init(tensorboard_mode=MANUAL) as ctx:
        ctx.train.write_scalars(1, {"x": 1.0})
        ctx.train.sync_tensorboard()
        child = os.fork()
        if child == 0:
            ctx.train.write_scalars(2, {"x": 1.0})
            ctx.train.sync_tensorboard()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert points(folder_of(ctx)) == {"x": [(1, 1.0)]}


HEAVY = """
import sys
from det_core import core
with core.init(name="light", tensorboard_mode=core.TensorboardMode.AUTO) as ctx:
    for step in range(1, 4):
        ctx.train.report_training_metrics(step, {"loss": 1 / step})
    folder = ctx.train.get_tensorboard_path()
print(folder)
print(sorted({"torch", "tensorflow", "tensorboardX", "boto3", "google.cloud.storage", "numpy"} & set(sys.modules)))
"""


def test_event_writer_imports_no_slow_packages() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    folder, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert points(Path(folder)) == {"training/loss": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]}


def test_directory_named_tensorboard_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    script = "import sys; sys.path[:] = [sys.argv[1], *(p for p in sys.path if 'site-packages' not in p)]\n"
    script += f"sys.path.append({str(Path(core.__file__).parents[2])!r})\n"
    script += (
        "from det_core import core; from det_core.core._tensorboard import resolve_mode; print(resolve_mode(None))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "TensorboardMode.MANUAL\n"


def test_resumed_run_has_every_step_once() -> None:
    for resume, steps in ((None, range(1, 6)), ("latest", range(4, 9))):
        with core.init(name="drawn", resume=resume) as ctx:
            for step in steps:
                ctx.train.report_training_metrics(step, {"loss": 1 / step, "note": "text"})
                ctx.train.report_validation_metrics(step, {"accuracy": step / 10})
            folder = ctx.train.get_tensorboard_path()
    found = points(folder)
    assert [step for step, _ in found["training/loss"]] == list(range(1, 9))
    assert [step for step, _ in found["validation/accuracy"]] == list(range(1, 9))
    assert set(found) == {"training/loss", "validation/accuracy"}


def killed(work: Callable[[], None]) -> None:
    """Do it in a child, which has to kill itself on the way."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def session(last: int, store: Path, *, save_at: int = 0, epochs: bool = False) -> str:
    """Report steps up to ``last`` in a run that goes on from its checkpoint; the values say which session it was."""
    with core.init(name="left", resume="latest", checkpoint_storage=store, tensorboard_mode=AUTO) as ctx:
        with ctx.checkpoint.resume():
            first = ctx.steps_completed + 1
        for step in range(first, last + 1):
            ctx.train.report_training_metrics(step, {"loss": step + first / 1000})
            if epochs and step % 10 == 0:
                ctx.train.report_validation_metrics(step // 10, {"epoch": step // 10})
        if save_at:
            with ctx.checkpoint.store_path({"steps_completed": save_at}) as (path, _):
                (path / "f").write_text("f")
        return ctx.run_id


def exported(run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of the record."""
    run = client.run(run_id)
    return {
        f"{group}/{key}": [(row.steps_completed, pytest.approx(row.metrics[key])) for row in run.rows(group)]
        for group, key in (("training", "loss"), ("validation", "epoch"))
        if group in run.groups()
    }


def test_resumed_run_writes_rows_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows up to the checkpoint count, and nothing of them was drawn: the next process is killed as early."""
    for last, save_at in ((60, 50), (60, 55)):
        with monkeypatch.context() as patch:
            patch.setattr("det_core.core._event_writer.POLL_INTERVAL", 3600.0)
            patch.setattr("det_core.core._tensorboard.TensorboardFiles.sync", kill_self)
            killed(lambda last=last, save_at=save_at: session(last, tmp_path, save_at=save_at))
    run_id = session(70, tmp_path)
    found = points(tmp_path / "tensorboard" / run_id)
    assert found == exported(run_id)
    assert [step for step, _ in found["training/loss"]] == [*range(1, 71)]


def test_run_killed_at_its_end_is_written_by_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("det_core.core._event_writer.POLL_INTERVAL", 3600.0)
        patch.setattr("det_core.core._tensorboard.TensorboardFiles.sync", kill_self)
        killed(lambda: session(50, tmp_path, save_at=50))
    run_id = session(50, tmp_path)
    assert points(tmp_path / "tensorboard" / run_id) == exported(run_id)
    assert not drawing_threads()
    files = list(tmp_path.rglob("*tfevents*"))
    session(50, tmp_path)
    assert list(tmp_path.rglob("*tfevents*")) == files, "drawn once"


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
def test_process_killed_while_writing_leaves_no_gap_or_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    from det_core.core import _event_file

    flush = _event_file.EventFile.flush
    writes: list[int] = []

    def flush_and_die(file: _event_file.EventFile) -> None:
        if file._pending:
            writes.append(len(file._pending))
            if moment == "before" and len(writes) == number:
                kill_self()
        flush(file)
        if moment == "after" and len(writes) == number:
            kill_self()

    def work() -> None:
        with core.init(name="left", checkpoint_storage=tmp_path, tensorboard_mode=AUTO) as ctx:
            for step in range(1, 41):
                ctx.train.report_training_metrics(step, {"loss": step + 0.001})
                if step % 20 == 0:
                    with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                        (path / "f").write_text("f")
                    ctx.train.sync_tensorboard()

    with monkeypatch.context() as patch:
        patch.setattr("det_core.core._event_writer.POLL_INTERVAL", 3600.0)
        patch.setattr(_event_file.EventFile, "flush", flush_and_die)
        patch.setattr("det_core.core._tensorboard.TensorboardFiles.sync", lambda self: None)
        killed(work)
        number = 1
        killed(lambda: session(45, tmp_path))  # in the middle of what that one has left, in a file of its own
    run_id = session(50, tmp_path)
    found = points(tmp_path / "tensorboard" / run_id)
    assert [step for step, _ in found["training/loss"]] == [*range(1, 51)]
    assert found == exported(run_id)


def test_group_with_epoch_steps_drops_no_rows_of_another(tmp_path: Path) -> None:
    """A mark counts for all tags: at the step of the first rows, epoch 6, batches 6 to 50 were gone."""
    session(60, tmp_path, save_at=50, epochs=True)
    run_id = session(80, tmp_path, epochs=True)
    found = points(tmp_path / "tensorboard" / run_id)
    assert found["training/loss"] == exported(run_id)["training/loss"]


def test_event_files_deleted_between_processes_are_rewritten(tmp_path: Path) -> None:
    for last, save_at in ((20, 15), (40, 30)):
        run_id = session(last, tmp_path, save_at=save_at)
    local = Path(client.run(run_id).path, "tensorboard", "rank-0")
    shutil.rmtree(local)
    session(50, tmp_path)
    assert points(local) == exported(run_id)
    (file,) = local.iterdir()
    session(30, tmp_path)  # reports nothing
    file.unlink()
    (local / "events.out.tfevents.1.mine").write_bytes(b"")
    session(60, tmp_path)
    found = points(local)["training/loss"]
    assert {step for step, _ in found} == {step for step, _ in exported(run_id)["training/loss"]}, "no hole"


def test_event_file_of_slow_clock_sorts_last(tmp_path: Path) -> None:
    from det_core.core._event_file import EventFile

    ahead = tmp_path / "events.out.tfevents.9999999999.000001.other.7"
    ahead.write_bytes(b"")
    (tmp_path / "events.out.tfevents.mine").write_bytes(b"")
    file = EventFile(tmp_path)
    assert sorted([ahead, file.path]) == [ahead, file.path]


@pytest.mark.parametrize("mode", [AUTO, MANUAL])
def test_write_scalars_works_in_both_modes(mode: core.TensorboardMode, home: Path) -> None:
    torch = pytest.importorskip("torch")
    with core.init(tensorboard_mode=mode) as ctx:
        for step in range(1, 4):
            ctx.train.write_scalars(step, {"Loss/train": 1 / step, "device": torch.tensor(step)})
        ctx.train.report_training_metrics(3, {"loss": 0.5})
        folder = ctx.train.get_tensorboard_path()
    found = points(folder)
    assert found.pop("training/loss", None) == ([(3, 0.5)] if mode is AUTO else None)
    assert found == {
        "Loss/train": [(step, pytest.approx(1 / step)) for step in (1, 2, 3)],
        "device": [(step, float(step)) for step in (1, 2, 3)],
    }
    assert client.run(ctx.run_id).metrics("Loss").empty, "nothing of it is reported"


def test_write_scalars_without_extra_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("_tensorboard", "_event_writer"):
        monkeypatch.setattr(f"det_core.core.{module}.is_installed", lambda: False)
    with core.init() as ctx:
        for step in range(3):
            ctx.train.write_scalars(step, {"loss": 1.0})
    assert caplog.text.count("no event files are written") == 1 and "pip install" in caplog.text


@pytest.mark.parametrize("mode", [AUTO, MANUAL])
def test_sync_copies_current_files(mode: core.TensorboardMode, tmp_path: Path) -> None:
    with core.init(tensorboard_mode=mode, checkpoint_storage=tmp_path / "store") as ctx:
        kept = tmp_path / "store" / "tensorboard" / ctx.run_id
        ctx.train.sync_tensorboard()
        assert not kept.exists()
        ctx.train.write_scalars(1, {"x": 1.0})
        ctx.train.sync_tensorboard()
        assert points(kept) == {"x": [(1, 1.0)]}
        (ctx.train.get_tensorboard_path() / "mine.txt").write_text("mine")
        with ctx.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "f").write_text("f")
        assert (kept / "mine.txt").exists() == (mode is AUTO), "with a checkpoint, if AUTO"
        ctx.train.write_scalars(2, {"x": 2.0})
    shipped = [(1, 1.0), (2, 2.0)] if mode is AUTO else [(1, 1.0)]
    assert points(kept) == {"x": shipped}


def test_sync_separates_files_of_ranks(tmp_path: Path) -> None:
    def rank(distributed: core.DistributedContext) -> str:
        store = tmp_path / "store"
        with core.init(distributed=distributed, tensorboard_mode=MANUAL, checkpoint_storage=store) as ctx:
            ctx.train.write_scalars(1, {"rank": distributed.rank})
            ctx.train.sync_tensorboard()
            return ctx.run_id

    run_id = as_ranks(2, rank)[0]
    kept = tmp_path / "store" / "tensorboard" / run_id
    assert points(kept / "rank-1") == {"rank": [(1, 1.0)]}
    assert sorted(p.name == "rank-1" for p in kept.iterdir()) == [False, True]


def test_sync_copies_files_of_user_writer(tmp_path: Path) -> None:
    """Two writers, a file each; both curves have every step once, also after a resume, and each file is kept once."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    store = tmp_path / "store"
    for first, last in ((1, 8), (6, 12)):
        with core.init(name="mine", resume="latest", checkpoint_storage=store) as ctx:
            if first > 1:
                with ctx.checkpoint.resume():
                    assert ctx.steps_completed == 5
            folder = ctx.train.get_tensorboard_path()
            with tensorboard.SummaryWriter(folder) as writer:
                for step in range(first, last):
                    writer.add_scalar("mine", first + step / 100, step)
                    ctx.train.report_training_metrics(step, {"loss": first + step / 100})
                    if step == 5:
                        with ctx.checkpoint.store_path({"steps_completed": 5}) as (path, _):
                            (path / "f").write_text("f")
                writer.flush()
                ctx.train.sync_tensorboard()
        ended = int(time.time())
        until(lambda ended=ended: int(time.time()) > ended)  # SummaryWriter names its files by the second
    kept = store / "tensorboard" / ctx.run_id
    expected = [(step, pytest.approx((1 if step < 6 else 6) + step / 100)) for step in range(1, 12)]
    for place in (folder, kept):
        assert points(place) == {"mine": expected, "training/loss": expected}
        assert len(list(place.rglob("*tfevents*"))) == 4
    assert sorted(p.read_bytes() for p in kept.iterdir()) == sorted(p.read_bytes() for p in folder.iterdir())
