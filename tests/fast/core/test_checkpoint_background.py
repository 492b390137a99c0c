"""Saving in the background: by one rank, with what may happen meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointBusy, CheckpointError, ContextClosed, StorageError
from det_core.storage import Disk
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.disks import FaultyDisk, Gate
from support.processes import until
from support.threads import once_it_waits

LARGE = {**FILES, "large": bytes(range(256)) * 70_000, "dir/exact": b"x" * (16 << 20)}  # a chunk and more, and one


@contextmanager
def context_on(folder: Path, disk: Disk | None = None, **options: Any) -> Iterator[tuple[CheckpointContext, Recorder]]:
    """Yield a context on ``folder/store``, and close it if the test has not."""
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, folder / "store", disk=disk, **options)
        try:
            yield context, recorder
        finally:
            if isinstance(disk, Gate):
                disk.opened_up.set()
            context.close()


def threads() -> list[threading.Thread]:
    """Names of the threads that save."""
    return [thread for thread in threading.enumerate() if thread.name == "det_core-upload"]


def overwrite(folder: Path) -> None:
    """Write other bytes over every file in place, and one more."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as f:
                f.write(b"\xff" * path.stat().st_size)
                f.truncate(path.stat().st_size // 2)
    (folder / "more").write_bytes(b"more")


class Cloning(Disk):
    """A file system that can clone, as far as anybody can see."""

    cloned = 0

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation != "clone":
            return super().do(operation, path, function, *args)
        target, _, source = args
        self.cloned += 1
        os.sendfile(target, source, 0, os.fstat(source).st_size)
        return None


class Rewriting(Cloning):
    """A disk on which a file is written anew, in place, after some of it was copied.

    Args:
        file: the file.
        clones: whether the disk can clone.
    """

    def __init__(self, file: Path, clones: bool) -> None:
        super().__init__("here")
        self.file, self.clones = file, clones
        os.utime(file, (1, 1))  # so the time of the write differs, however coarse the clock of the file system is

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "clone" and not self.clones:
            raise self.error(operation, path, OSError(errno.EOPNOTSUPP, "not here"))
        result = super().do(operation, path, function, *args)
        if operation == ("clone" if self.clones else "read") and self.file.stat().st_mtime == 1:
            with self.file.open("r+b") as file:
                file.write(b"n" * self.file.stat().st_size)
        return result


class TestUpload:
    """``upload(blocking=False)``."""

    @pytest.mark.parametrize(("blocking", "clones"), [(True, False), (False, False), (False, True)])
    def test_file_that_is_rewritten_while_it_is_copied_is_an_error(
        self, blocking: bool, clones: bool, tmp_path: Path
    ) -> None:
        source = fill(tmp_path / "source", {"model.pt": b"o" * 1_000_000})
        with context_on(tmp_path, Rewriting(source / "model.pt", clones)) as (context, _):
            with pytest.raises(CheckpointError, match=f"{source}/model.pt was changed while it was copied"):
                context.upload(source, STEPS, blocking=blocking)
            assert listed(tmp_path / "store") == []
            storage_id = context.upload(source, STEPS, blocking=blocking)
        assert tree(tmp_path / "store" / storage_id)["model.pt"] == b"n" * 1_000_000
        nothing_is_left_over(tmp_path / "store", restart=0)

    @pytest.mark.parametrize("disk", [None, Cloning("here")])
    def test_the_source_may_be_overwritten_at_once(self, disk: Disk | None, tmp_path: Path) -> None:
        source = fill(tmp_path / "source", LARGE)
        (source / "link").symlink_to("rng")
        (source / "folder").symlink_to("sub")
        with context_on(tmp_path, disk) as (context, recorder):
            storage_id = context.upload(source, STEPS, blocking=False)
            overwrite(source)
            context.close()
            assert [record["storage_id"] for record in recorder.registered] == [storage_id]
        assert listed(tmp_path / "store") == [storage_id]
        found = tree(tmp_path / "store" / storage_id)
        found.pop("metadata.json")
        linked = {"link": b"r", "folder/optimizer.pt": b"o" * 1000, "folder/deep/empty": b""}
        assert found == LARGE | linked
        if isinstance(disk, Cloning):
            assert disk.cloned == len(LARGE | linked)
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_it_returns_before_it_is_saved(self, tmp_path: Path) -> None:
        source, gate = fill(tmp_path / "source"), Gate()
        with context_on(tmp_path, gate) as (context, recorder):
            storage_id = context.upload(source, STEPS, blocking=False)
            assert gate.reached.wait()
            overwrite(source)
            assert listed(tmp_path / "store") == [] and recorder.registered == []
            gate.opened_up.set()
            context.close()
            assert listed(tmp_path / "store") == [storage_id]
            assert len(recorder.registered) == 1
        assert tree(tmp_path / "store" / storage_id) == tree(tmp_path / "store" / storage_id) | FILES

    def test_what_is_wrong_with_the_arguments_is_said_at_once(self, tmp_path: Path) -> None:
        source = fill(tmp_path / "source")
        with context_on(tmp_path) as (context, _):
            with pytest.raises(ValueError, match="not a folder"):
                context.upload(tmp_path / "nothing", STEPS, blocking=False)
            with pytest.raises(ValueError, match="steps_completed"):
                context.upload(source, {}, blocking=False)
            with pytest.raises(ValueError, match=r"if_busy='later': expected 'wait' or 'raise'"):
                context.upload(source, STEPS, blocking=False, if_busy="later")  # type: ignore[arg-type]
            (source / "out").symlink_to("/etc/hostname")
            with pytest.raises(ValueError, match="outside the directory"):
                context.upload(source, STEPS, blocking=False)
        assert not (tmp_path / "store").exists()

    def test_metadata_is_as_it_was(self, tmp_path: Path) -> None:
        metadata: dict[str, Any] = {"steps_completed": 1, "list": [1]}
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            context.upload(fill(tmp_path / "source"), metadata, blocking=False)
            metadata["list"].append(2)
            gate.opened_up.set()
        assert recorder.registered[0]["metadata"] == {"steps_completed": 1, "list": [1]}


class TestStorePath:
    """``store_path(blocking=False)`` and ``begin()``."""

    def test_the_end_of_the_block_does_not_wait(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            with context.store_path(STEPS, blocking=False) as (path, storage_id):
                fill(path)
            assert recorder.registered == []
            gate.opened_up.set()
        assert listed(tmp_path / "store") == [storage_id]
        assert len(recorder.registered) == 1

    def test_a_handle_tells_when_it_is_done(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, _):
            handle = context.begin(STEPS)
            assert not handle.done and not handle.wait(0.01), "nobody has committed it"
            fill(handle.path)
            handle.commit(blocking=False)
            assert not handle.done and not handle.wait(0.05)
            with pytest.raises(RuntimeError, match="committed or aborted before"):
                handle.commit()
            handle.abort()
            gate.opened_up.set()
            assert handle.wait() and handle.done
            assert listed(tmp_path / "store") == [handle.storage_id]

    def test_it_is_committed_from_another_thread(self, tmp_path: Path) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with context_on(tmp_path) as (context, recorder), ThreadPoolExecutor(1) as pool:
            handle = context.begin(STEPS)
            future = pool.submit(fill, handle.path)
            future.add_done_callback(lambda _: handle.commit(blocking=False))
            future.result()
        assert [record["storage_id"] for record in recorder.registered] == [handle.storage_id]


class TestBusy:
    def test_the_next_one_waits(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            first = context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            assert gate.reached.wait()
            once_it_waits(gate.opened_up.set)
            with context.store_path(STEPS, blocking=False) as (_, second):
                assert [record["storage_id"] for record in recorder.registered] == [first]
            third = context.upload(tmp_path / "source", STEPS)
            assert [record["storage_id"] for record in recorder.registered] == [first, second, third]

    @pytest.mark.parametrize("call", ["upload", "blocking", "store_path", "begin"])
    def test_the_next_one_is_refused(self, call: str, tmp_path: Path) -> None:
        source = fill(tmp_path / "source")
        with context_on(tmp_path, gate := Gate()) as (context, _):
            first = context.upload(source, STEPS, blocking=False)
            with pytest.raises(CheckpointBusy, match=first):
                if call == "begin":
                    context.begin(STEPS, if_busy="raise")
                elif call == "store_path":
                    with context.store_path(STEPS, if_busy="raise"):
                        pass
                else:
                    context.upload(source, STEPS, blocking=call == "blocking", if_busy="raise")
            gate.opened_up.set()
            until(lambda: first in listed(tmp_path / "store") and not threads())
            second = context.upload(source, STEPS, if_busy="raise")
        assert set(listed(tmp_path / "store")) == {first, second}

    @pytest.mark.parametrize("if_busy", ["wait", "raise"])
    def test_one_is_open_at_a_time(self, if_busy: Any, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, _):
            first = context.begin(STEPS)
            for call in (context.begin, lambda *a, **k: context.upload(fill(tmp_path / "source"), *a, **k)):
                with pytest.raises(CheckpointBusy, match=f"{first.storage_id} was begun, and neither committed nor"):
                    call(STEPS, if_busy=if_busy)
            first.abort(blocking=False)
            context.begin(STEPS).commit()
        assert len(listed(tmp_path / "store")) == 1


class TestFailures:
    def failing(self, folder: Path) -> tuple[FaultyDisk, Path]:
        disk = FaultyDisk(str(folder / "store"), 0, "ENOSPC")
        return disk, fill(folder / "source")

    def fail(self, context: CheckpointContext, disk: FaultyDisk) -> str:
        """Save a checkpoint that fails in the background, and return its ID after the failure."""
        handle = context.begin(STEPS)
        fill(handle.path)
        disk.at = disk.calls + 3
        handle.commit(blocking=False)
        until(lambda: handle.done)
        assert disk.struck
        return handle.storage_id

    @pytest.mark.parametrize("call", ["upload", "store_path", "begin", "delete", "get_metadata", "restore_path"])
    def test_the_next_call_raises_and_the_one_after_does_not(self, call: str, tmp_path: Path) -> None:
        disk, source = self.failing(tmp_path)
        with context_on(tmp_path, disk) as (context, _):
            good = context.upload(source, STEPS)

            def do() -> None:
                if call == "upload":
                    context.upload(source, STEPS)
                elif call == "store_path":
                    with context.store_path(STEPS):
                        pass
                elif call == "begin":
                    context.begin(STEPS).abort()
                elif call == "delete":
                    context.delete(good)
                elif call == "restore_path":
                    with context.restore_path(good):
                        pass
                else:
                    context.get_metadata(good)

            failed = self.fail(context, disk)
            with pytest.raises(StorageError, match=rf"{failed} was not saved in the background: .*cannot ") as caught:
                do()
            assert caught.value.errno == errno.ENOSPC
            assert good in listed(tmp_path / "store")
            do()
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_close_raises_what_nobody_was_told(self, tmp_path: Path) -> None:
        disk, _ = self.failing(tmp_path)
        with context_on(tmp_path, disk) as (context, _):
            failed = self.fail(context, disk)
            with pytest.raises(StorageError, match=failed):
                context.close()
            context.close()

    def test_what_a_wait_has_told_is_not_told_again(self, tmp_path: Path) -> None:
        disk, _ = self.failing(tmp_path)
        with context_on(tmp_path, disk) as (context, _):
            handle = context.begin(STEPS)
            disk.at = disk.calls + 2
            handle.commit(blocking=False)
            with pytest.raises(StorageError, match="not saved"):
                handle.wait()

    def test_metadata_that_cannot_be_stored_fails_the_commit(self, tmp_path: Path) -> None:
        metadata: dict[str, Any] = {"steps_completed": 1}
        with context_on(tmp_path) as (context, _):
            with pytest.raises(ValueError, match="set at /wrong"), context.store_path(metadata):
                metadata["wrong"] = {1}
            with context.store_path({**STEPS, "x": 1}, blocking=False) as (path, storage_id):
                path.rmdir()
            with pytest.raises(CheckpointError, match=f"{storage_id} was not saved .* was removed"):
                context.close()


class TestClosing:
    def test_it_waits(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            storage_id = context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            once_it_waits(gate.opened_up.set)
            context.close()
            assert [record["storage_id"] for record in recorder.registered] == [storage_id]
            assert recorder.said == []
        assert not threads()

    @pytest.mark.parametrize("soon", [0.0, 3600.0])
    def test_a_preempted_process_waits_while_there_is_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: float
    ) -> None:
        """The wait is announced for a long save only."""
        monkeypatch.setattr("det_core.core._checkpoint._commit.NOTICE_DELAY", soon)
        with context_on(tmp_path, gate := Gate(), deadline=lambda: 1e9) as (context, recorder):
            storage_id = context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            once_it_waits(gate.opened_up.set)
            context.close()
            *waits, last = recorder.said
            assert last == f"checkpoint {storage_id} is saved: steps_completed 3"
            assert len(waits) == (soon == 0)
            assert all(f"waiting for checkpoint {storage_id} to be saved, for " in said for said in waits)
        assert listed(tmp_path / "store") == [storage_id]

    def test_it_gives_up_when_the_time_is_over_and_names_what_is_saved(self, tmp_path: Path) -> None:
        """The disk takes a file at a time, for ever; between two, the upload can be stopped."""

        class Slow(Disk):
            slow = False

            def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
                if self.slow and operation == "sync":
                    time.sleep(0.05)
                return super().do(operation, path, function, *args)

        disk = Slow(str(tmp_path / "store"))
        deadline: list[float] = []
        source = fill(tmp_path / "source", {f"{i}": b"x" for i in range(500)})
        with context_on(tmp_path, disk, deadline=lambda: deadline[0] if deadline else None) as (context, _):
            first = context.upload(source, STEPS, selector=lambda path: path == "1")
            disk.slow = True
            second = context.upload(source, {"steps_completed": 9}, blocking=False)
            deadline.append(time.monotonic() + 0.5)
            with pytest.raises(CheckpointError) as caught:
                context.close()
        said = str(caught.value)
        assert f"checkpoint {second} was not saved" in said
        assert f"the newest that is saved is {first}, steps_completed 3" in said
        assert listed(tmp_path / "store") == [first]
        assert list((tmp_path / "store" / ".det_core-tmp").iterdir()) == []

    def test_a_disk_that_hangs_does_not_hold_a_preempted_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("det_core.core._checkpoint._commit.STOP_TIMEOUT", 0.2)
        with context_on(tmp_path, gate := Gate(), deadline=lambda: 0.0) as (context, _):
            storage_id = context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            assert gate.reached.wait()
            with pytest.raises(
                CheckpointError,
                match=f"{storage_id} was not saved: its commit could not be stopped.*no checkpoint of this run",
            ):
                context.close()
            gate.opened_up.set()
        nothing_is_left_over(tmp_path / "store")

    def test_an_interrupt_is_not_swallowed(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            assert gate.reached.wait()
            once_it_waits(lambda: (os.kill(os.getpid(), signal.SIGINT), gate.opened_up.set()))
            with pytest.raises(KeyboardInterrupt):
                context.close()
        assert recorder.registered == []
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_an_interrupt_of_the_next_call_leaves_the_upload_alone(self, tmp_path: Path) -> None:
        with context_on(tmp_path, gate := Gate()) as (context, recorder):
            context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            assert gate.reached.wait()
            once_it_waits(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                context.upload(tmp_path / "source", STEPS)
            gate.opened_up.set()
        assert len(recorder.registered) == 1

    def test_what_is_committed_after_the_end_is_refused(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, _):
            handle = context.begin(STEPS)
            context.close()
            with pytest.raises(RuntimeError):
                handle.commit(blocking=False)
            with pytest.raises(ContextClosed):
                context.begin(STEPS)


def test_a_forked_child_leaves_the_upload_to_its_parent(tmp_path: Path) -> None:
    with context_on(tmp_path, gate := Gate()) as (context, _):
        handle = context.begin(STEPS)
        fill(handle.path)
        handle.commit(blocking=False)
        assert gate.reached.wait()
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (lambda: context.begin(STEPS), handle.wait, lambda: handle.commit(blocking=False)):
                try:
                    call()
                except ContextClosed:
                    refused += 1
            context.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        gate.opened_up.set()
    assert listed(tmp_path / "store") == [handle.storage_id]
