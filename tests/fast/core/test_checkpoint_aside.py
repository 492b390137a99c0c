"""What a helper does for a background save before the state is there, and where it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointContext
from det_core.core._checkpoint._aside import Announcement, _processor
from det_core.core._checkpoint._aside._prepare import Preparation
from det_core.core._checkpoint._aside._processor import Distance, current
from det_core.journal import Journal
from det_core.storage import DirectoryStore
from support.checkpoints import RUN, STEPS, Recorder, alone, listed, nothing_is_left_over
from support.processes import until

torch = pytest.importorskip("torch")


class Reports:
    """Reports in a file; counts who brings them to the disk."""

    def __init__(self, path: Path | None) -> None:
        self.file = path
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1


def context_with(reports: Reports, root: Path, recorder: Recorder) -> CheckpointContext:
    return CheckpointContext(
        alone(),
        DirectoryStore(root),
        run_id=RUN,
        restart=0,
        reports=reports,
        registered=recorder.registered.append,
        deleted=lambda *_: None,
        restored=lambda *_: None,
    )


class TestReports:
    """What was reported before a checkpoint is on the disk when that is complete."""

    def test_the_helper_brings_them_there(self, tmp_path: Path) -> None:
        (tmp_path / "journal").write_text("{}\n")
        reports, recorder = Reports(tmp_path / "journal"), Recorder()
        context = context_with(reports, tmp_path / "store", recorder)
        context.save({"a": torch.ones(3)}, STEPS, blocking=False)
        context.close()
        assert len(recorder.registered) == 1 and reports.flushed == 0

    @pytest.mark.parametrize("file", ["gone", None])
    def test_what_it_cannot_bring_there_this_process_does(self, file: str | None, tmp_path: Path) -> None:
        reports, recorder = Reports(tmp_path / file if file else None), Recorder()
        context = context_with(reports, tmp_path / "store", recorder)
        context.save({"a": torch.ones(3)}, STEPS, blocking=False)
        context.close()
        assert len(recorder.registered) == 1 and reports.flushed == 1

    def test_of_files_that_the_script_writes_this_process_does(self, tmp_path: Path) -> None:
        (tmp_path / "journal").write_text("{}\n")
        reports, recorder = Reports(tmp_path / "journal"), Recorder()
        context = context_with(reports, tmp_path / "store", recorder)
        with context.store_path(STEPS, blocking=False) as (path, _):
            (path / "weights").write_bytes(b"1")
        context.close()
        assert len(recorder.registered) == 1 and reports.flushed == 1

    def test_in_a_run_they_are_its_journal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flush, flushed = Journal.flush, []
        monkeypatch.setattr(Journal, "flush", lambda journal: (flushed.append(journal.file), flush(journal)))
        mode = core.TensorboardMode.MANUAL
        with core.init(checkpoint_storage=str(tmp_path / "store"), tensorboard_mode=mode) as ctx:
            before = len(flushed)
            for step in range(3):
                ctx.train.report_training_metrics(step, {"loss": step})
                ctx.checkpoint.save({}, {"steps_completed": step}, blocking=False, if_busy="wait")
                until(lambda: not ctx.checkpoint._writer._background.under_way())
            assert flushed[before:] == [None], "by this process only the first time, when the file was new"
        assert len(listed(tmp_path / "store")) == 3

    def test_the_disk_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: int) -> None:
            raise OSError(5, "Input/output error")

        store, owner = DirectoryStore(tmp_path / "store"), alone_owner(tmp_path)
        preparation = Preparation(store, Announcement("x", owner, "state.pt", {}, str(tmp_path / "journal")))
        (tmp_path / "journal").write_text("{}\n")
        (tmp_path / "store").mkdir()
        monkeypatch.setattr(os, "fsync", refuse)
        preparation.run()
        assert not preparation.flushed and preparation.draft is not None
        preparation.draft.abort()


def alone_owner(folder: Path):  # type: ignore[no-untyped-def]
    """The owner of what this process writes."""
    context = Recorder().context(alone(), folder / "unused")
    try:
        return context._owner()
    finally:
        context.close()


class TestWhatIsTold:
    """What the helper made of it."""

    @pytest.mark.parametrize("name", ["state.pt", "folder/of/state.pt"])
    def test_is_what_the_store_has(self, name: str, tmp_path: Path) -> None:
        recorder = Recorder()
        context = recorder.context(alone(), tmp_path / "store")
        saved = context.save({"a": torch.ones(3)}, STEPS, name=name, blocking=False)
        context.close()
        manifest = DirectoryStore(tmp_path / "store").open(saved).manifest
        (told,) = recorder.registered
        assert told["resources"] == manifest.resources and set(manifest.files) == {name, "metadata.json"}
        assert told["time"] == manifest.header.time and told["ordinal"] == manifest.header.ordinal == 1
        assert (told["storage_id"], told["steps_completed"], told["metadata"]) == (
            saved,
            STEPS["steps_completed"],
            STEPS,
        )


class TestWhatIsPrepared:
    """The folder."""

    def test_is_removed_if_the_state_cannot_be_had(self, tmp_path: Path) -> None:
        recorder = Recorder()
        context = recorder.context(alone(), tmp_path / "store")
        for _ in range(3):
            with pytest.raises(Exception, match="pickle"):
                context.save({"function": lambda: 1}, STEPS, blocking=False)
        saved = context.save({"a": 1}, STEPS, blocking=False)
        context.close()
        assert listed(tmp_path / "store") == [saved]
        nothing_is_left_over(tmp_path / "store", restart=0)

    @pytest.mark.parametrize("state", [{"a": torch.arange(3.0)}, {"function": lambda: 1}])
    def test_by_a_helper_that_died_is_no_obstacle(
        self, state: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorder = Recorder()
        context = recorder.context(alone(), tmp_path / "store")
        context.save({}, STEPS, blocking=False)
        until(lambda: recorder.registered)
        states = context._writer._states
        assert states._saver is not None
        first, take = states._saver.pid, states.snapshot

        def kill_and_take(state: object) -> object:
            """The helper has made the folder, and ends."""
            aside = tmp_path / "store" / ".det_core-tmp"
            until(lambda: list(aside.iterdir()))
            assert states._saver is not None and first is not None
            os.kill(first, signal.SIGKILL)
            until(lambda: states._saver is not None and states._saver.pid is None)
            return take(state)

        monkeypatch.setattr(states, "snapshot", kill_and_take)
        if "a" in state:
            context.save(state, STEPS, blocking=False)
        else:
            with pytest.raises(Exception, match="pickle"):
                context.save(state, STEPS, blocking=False)
        context.close()
        assert len(listed(tmp_path / "store")) == (2 if "a" in state else 1)
        nothing_is_left_over(tmp_path / "store", restart=0)


class TestDistance:
    """From the processor of the thread that trains."""

    def test_is_kept_and_given_up(self) -> None:
        mine = os.sched_getaffinity(0)
        if len(mine) == 1:
            pytest.skip("this machine has one processor")
        ready, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (ready.set(), done.wait()))
        thread.start()
        try:
            assert ready.wait() and thread.native_id is not None
            distance = Distance([thread.native_id])
            for processor in (*mine, -1):
                distance.keep(processor)
                assert os.sched_getaffinity(thread.native_id) == mine - {processor}
            assert os.sched_getaffinity(0) == mine
        finally:
            done.set()
            thread.join()

    def test_nowhere_to_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
        told: list[object] = []
        monkeypatch.setattr(os, "sched_setaffinity", lambda thread, allowed: told.append((thread, allowed)))
        Distance([1]).keep(5)
        assert told == [(1, {5})]

    def test_it_may_be_forbidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "sched_setaffinity", refuse)
        Distance([os.getpid()]).keep(current())

    def test_the_processor_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = os.sched_getaffinity(0)
        try:
            for processor in before:
                os.sched_setaffinity(0, {processor})
                assert current() == processor
        finally:
            os.sched_setaffinity(0, before)
        monkeypatch.setattr(_processor.ctypes, "CDLL", lambda _: object())
        _processor._sched_getcpu.cache_clear()
        try:
            assert current() == -1
        finally:
            _processor._sched_getcpu.cache_clear()


def test_a_helper_that_there_are_no_descriptors_for_leaves_none_open() -> None:
    done = subprocess.run([sys.executable, "-c", NO_DESCRIPTORS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


NO_DESCRIPTORS = """
import os, resource
from det_core.core._checkpoint._aside._errand import Unavailable
from det_core.core._checkpoint._aside._process import HelperProcess

def all_that_are_left():
    found = []
    while True:
        try:
            found.append(os.dup(0))
        except OSError:
            return found

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = all_that_are_left()
for room in range(7):  # two are enough for one direction; from four on there are none for starting the process
    free = [taken.pop() for _ in range(room)]
    for fd in free:
        os.close(fd)
    try:
        HelperProcess()
    except Unavailable as e:
        assert "Too many open files" in str(e), e
    else:
        raise AssertionError("it was started")
    again = all_that_are_left()
    assert len(again) == room, (len(again), room)
    taken += again
"""


_STRUCK = """
import os, signal, time
from det_core.core._checkpoint._aside._process import HelperProcess
for number in (signal.SIGINT, signal.SIGTERM):
    helper = HelperProcess()
    os.kill(helper.pid, number)  # before its first instruction
    while not (helper._begun or helper.gone):
        time.sleep(0.01)
    assert helper._begun
    helper.close()
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this process goes on to hear them"
"""


def test_a_helper_that_is_starting_does_not_hear_what_a_terminal_sends_to_all() -> None:
    done = subprocess.run([sys.executable, "-c", _STRUCK], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


_FORKING = """
import os, signal, threading
from det_core.core._checkpoint._aside._process import HelperProcess
for _ in range(3):
    found = []
    starting = threading.Thread(target=lambda: found.append(HelperProcess()))
    starting.start()
    children = []
    while starting.is_alive() and len(children) < 100:  # as a DataLoader's workers are, while a helper is being started
        if (pid := os.fork()) == 0:
            signal.pause()
        children.append(pid)
    starting.join()  # if it waits for what the children have inherited, it waits for ever
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    found[0].close()
"""


def test_a_helper_starts_while_the_script_forks() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKING], check=True)
