"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from det_core.core._tensorboard import _writer
from det_core.core._tensorboard._file import EventFile
from det_core.core._tensorboard._writer import EventWriter
from det_core.errors import MissingExtra, TensorboardError
from support import scripts
from support.processes import until
from support.threads import as_ranks

pytest.importorskip("tensorboard")


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every point under each tag, as TensorBoard shows them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    made = EventWriter(tmp_path)
    yield made
    made.close()


def test_scalars_come_back_under_their_group(writer: EventWriter, tmp_path: Path) -> None:
    writer.scalars("training", 1, {"loss": 0.5, "epoch": 1})
    writer.scalars("training", 2, {"loss": 0.25})
    writer.scalars("validation", 2, {"accuracy": 0.75})
    writer.scalars("my group", 2, {"x": -1})
    writer.close()
    assert points(tmp_path) == {
        "training/loss": [(1, 0.5), (2, 0.25)],
        "training/epoch": [(1, 1.0)],
        "validation/accuracy": [(2, 0.75)],
        "my group/x": [(2, -1.0)],
    }


def test_only_numbers_are_written(writer: EventWriter, tmp_path: Path) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    writer.scalars(
        "g",
        3,
        {
            "bool": True,
            "big": 1 << 40,
            "np": numpy.float32(0.5),
            "np int": numpy.int64(7),
            "np 0-d": numpy.array(2.0),
            "torch": torch.tensor(1.5),
            "nested": {"a": 1.0, "b": {"c": 2}},
            "text": "1.0",
            "np text": numpy.str_("1.0"),
            "none": None,
            "list": [1.0],
            "array": numpy.ones(1),
            "tensor": torch.ones(2),
            "complex": numpy.complex64(1),
            "torch complex": torch.tensor(1j),
            "huge": 10**400,
            "time": numpy.datetime64("2026-01-01"),
        },
    )
    writer.scalars("g", 4, {"text": "nothing to write here"})
    writer.close()
    assert points(tmp_path) == {
        "g/bool": [(3, 1.0)],
        "g/big": [(3, float(1 << 40))],
        "g/np": [(3, 0.5)],
        "g/np int": [(3, 7.0)],
        "g/np 0-d": [(3, 2.0)],
        "g/torch": [(3, 1.5)],
        "g/nested/a": [(3, 1.0)],
        "g/nested/b/c": [(3, 2.0)],
    }


def test_numbers_that_are_not_finite_are_written(writer: EventWriter, tmp_path: Path) -> None:
    writer.scalars("g", 1, {"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "over": 1e300})
    writer.close()
    found = {tag: value for tag, [(_, value)] in points(tmp_path).items()}
    assert math.isnan(found["g/nan"])
    assert (found["g/inf"], found["g/ninf"], found["g/over"]) == (math.inf, -math.inf, math.inf)


def test_a_value_is_the_one_it_had_when_reported(writer: EventWriter, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    loss, metrics = torch.tensor(1.0), {"plain": 1.0}
    for step in range(50):
        loss.fill_(step)
        metrics["plain"] = float(step)
        metrics["loss"] = loss
        writer.scalars("g", step, metrics)
    writer.close()
    assert points(tmp_path) == {tag: [(i, float(i)) for i in range(50)] for tag in ("g/plain", "g/loss")}


def test_a_row_without_a_step_is_not_drawn(writer: EventWriter, tmp_path: Path) -> None:
    writer.scalars("cpu", None, {"cpu_util_simple": 5.0})
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_before_the_first_row(writer: EventWriter, tmp_path: Path) -> None:
    writer.flush()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name == "det_core-tensorboard"]


def test_rows_become_readable_without_a_flush(
    writer: EventWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_writer, "FLUSH_EVERY", 0.2)
    writer.scalars("g", 1, {"x": 1.0})
    until(lambda: any(tmp_path.iterdir()) and "g/x" in points(tmp_path))


def test_after_close_the_thread_is_gone_and_reports_are_ignored(writer: EventWriter, tmp_path: Path) -> None:
    writer.scalars("g", 1, {"x": 1.0})
    writer.close()
    writer.scalars("g", 2, {"x": 1.0})
    writer.close()
    assert points(tmp_path) == {"g/x": [(1, 1.0)]}
    assert not [t for t in threading.enumerate() if t.name == "det_core-tensorboard"]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    for steps in (range(0, 8), range(5, 12), range(9, 15)):
        writer = EventWriter(tmp_path)
        for step in steps:
            writer.scalars("training", step, {"loss": steps.start + step / 10})
        writer.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert [step for step, _ in points(tmp_path)["training/loss"]] == list(range(15))
    assert points(tmp_path)["training/loss"][6] == (6, pytest.approx(5.6))


def test_many_threads_report_at_once(writer: EventWriter, tmp_path: Path) -> None:
    def report(name: int) -> None:
        for step in range(300):
            writer.scalars("g", step, {f"m{name}": float(step)})

    threads = [threading.Thread(target=report, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert points(tmp_path) == {f"g/m{i}": [(s, float(s)) for s in range(300)] for i in range(4)}


def test_a_file_that_cannot_be_written_warns_once_and_close_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = EventWriter(tmp_path / "file" / "tensorboard")
    with caplog.at_level(logging.WARNING, "det_core.core"):
        writer.scalars("g", 1, {"x": 1.0})
        writer.flush()
        until(lambda: "no more TensorBoard events" in caplog.text)
        for step in range(2, 12):
            writer.scalars("g", step, {"x": 1.0})
        writer.flush()
        with pytest.raises(TensorboardError, match=r"file/tensorboard lack 11 report\(s\).*Not a directory"):
            writer.close()
    assert caplog.text.count("no more TensorBoard events") == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from det_core.errors import TensorboardError
from det_core.core._tensorboard._writer import EventWriter
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = EventWriter(Path(sys.argv[1]))
writer.scalars("g", 0, {"x": 0.0})
writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for step in range(1, 5000):
    writer.scalars("g", step, {"x": float(step)})
try:
    writer.close()
except TensorboardError as e:
    print(e)
"""


def test_a_disk_that_fills_up_is_told_with_the_number_of_rows(tmp_path: Path) -> None:
    done = scripts.run(FULL_DISK, tmp_path, tmp_path / "events")
    lacking = int(done.stdout.split(" lack ")[1].split()[0])
    assert "File too large" in done.stdout and 4000 < lacking < 5000


def test_a_writer_that_cannot_keep_up_holds_a_report_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    write = EventFile.write
    monkeypatch.setattr(EventFile, "write", lambda self, *row: released.wait() and write(self, *row))
    monkeypatch.setattr(_writer, "WAIT_FOR_ROOM", 0.3)
    writer = EventWriter(tmp_path, max_queued=10)
    writer.scalars("g", 0, {"x": 0.0})
    until(lambda: not writer._rows)
    with caplog.at_level(logging.WARNING, "det_core.core"):
        for step in range(1, 111):
            writer.scalars("g", step, {"x": float(step)})
    assert caplog.text.count("cannot keep up") == 1
    released.set()
    until(lambda: not writer._rows)
    writer.scalars("g", 111, {"x": 1.0})
    with pytest.raises(TensorboardError, match=r"lack 100 report\(s\).*queue of 10 was full"):
        writer.close()
    assert [step for step, _ in points(tmp_path)["g/x"]] == [*range(11), 111]


def test_a_full_queue_makes_reports_wait_until_there_is_room(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, max_queued=5)
    for step in range(500):
        writer.scalars("g", step, {"x": float(step)})
    writer.close()
    assert len(points(tmp_path)["g/x"]) == 500


def test_a_forked_process_leaves_the_file_alone(writer: EventWriter, tmp_path: Path) -> None:
    writer.scalars("g", 1, {"x": 1.0})
    writer.flush()
    child = os.fork()
    if child == 0:
        writer.scalars("g", 2, {"x": 1.0})
        writer.flush()
        writer.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.close()
    assert points(tmp_path) == {"g/x": [(1, 1.0)]}


def test_without_tensorboard_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setitem(sys.modules, "tensorboard.compat", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[tensorboard\]'"):
        EventWriter(tmp_path)


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


def test_writing_imports_neither_torch_nor_what_else_takes_long() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    folder, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert points(Path(folder)) == {"training/loss": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]}


def test_a_folder_called_tensorboard_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    script = "import sys; sys.path[:] = [sys.argv[1], *(p for p in sys.path if 'site-packages' not in p)]\n"
    script += f"sys.path.append({str(Path(core.__file__).parents[2])!r})\n"
    script += "from det_core import core; from det_core.core._tensorboard import chosen_mode; print(chosen_mode(None))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "TensorboardMode.MANUAL\n"


def test_a_context_writes_what_is_reported_and_a_resumed_run_has_every_step_once() -> None:
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


@pytest.mark.parametrize("mode", [core.TensorboardMode.AUTO, core.TensorboardMode.MANUAL])
def test_scalars_of_their_own_names_are_written_in_both_modes(mode: core.TensorboardMode, home: Path) -> None:
    torch = pytest.importorskip("torch")
    with core.init(tensorboard_mode=mode) as ctx:
        for step in range(1, 4):
            ctx.train.write_scalars(step, {"Loss/train": 1 / step, "device": torch.tensor(step)})
        ctx.train.report_training_metrics(3, {"loss": 0.5})
        folder = ctx.train.get_tensorboard_path()
    found = points(folder)
    assert found.pop("training/loss", None) == ([(3, 0.5)] if mode is core.TensorboardMode.AUTO else None)
    assert found == {
        "Loss/train": [(step, pytest.approx(1 / step)) for step in (1, 2, 3)],
        "device": [(step, float(step)) for step in (1, 2, 3)],
    }
    assert client.run(ctx.run_id).metrics("Loss").empty, "nothing of it is reported"


def test_scalars_without_the_extra_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("det_core.core._tensorboard._mode.installed", lambda: False)
    with core.init() as ctx:
        for step in range(3):
            ctx.train.write_scalars(step, {"loss": 1.0})
    assert caplog.text.count("no event files are written") == 1 and "pip install" in caplog.text


@pytest.mark.parametrize("mode", [core.TensorboardMode.AUTO, core.TensorboardMode.MANUAL])
def test_what_there_is_now_is_shipped(mode: core.TensorboardMode, tmp_path: Path) -> None:
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
        assert (kept / "mine.txt").exists() == (mode is core.TensorboardMode.AUTO), "with a checkpoint, if AUTO"
        ctx.train.write_scalars(2, {"x": 2.0})
    shipped = [(1, 1.0), (2, 2.0)] if mode is core.TensorboardMode.AUTO else [(1, 1.0)]
    assert points(kept) == {"x": shipped}


def test_the_files_of_each_rank_are_kept_apart(tmp_path: Path) -> None:
    def rank(distributed: core.DistributedContext) -> str:
        mode = core.TensorboardMode.MANUAL
        store = tmp_path / "store"
        with core.init(distributed=distributed, tensorboard_mode=mode, checkpoint_storage=store) as ctx:
            ctx.train.write_scalars(1, {"rank": distributed.rank})
            ctx.train.sync_tensorboard()
            return ctx.run_id

    run_id = as_ranks(2, rank)[0]
    kept = tmp_path / "store" / "tensorboard" / run_id
    assert points(kept / "rank-1") == {"rank": [(1, 1.0)]}
    assert sorted(p.name == "rank-1" for p in kept.iterdir()) == [False, True]


def test_a_writer_of_the_users_beside_ours(tmp_path: Path) -> None:
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
