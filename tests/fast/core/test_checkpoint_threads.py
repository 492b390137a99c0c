"""Several threads that save, and a process that can start no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointBusy, CheckpointError, ContextClosed
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, listed, nothing_is_left_over, tree
from support.disks import Gate
from support.processes import until
from support.threads import as_ranks, once_it_waits


class Caller(threading.Thread):
    """A thread that makes one call, and keeps what it returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: object = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as e:
            self.result = e

    def end(self) -> Any:
        """Wait for it, and return what came of the call."""
        self.join()
        return self.result


@contextmanager
def context_on(folder: Path, **options: Any) -> Iterator[tuple[CheckpointContext, Recorder]]:
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, folder / "store", **options)
        try:
            yield context, recorder
        finally:
            context.close()


@pytest.mark.parametrize("blocking", [(False, False), (False, True)], ids=["background", "one waits"])
def test_save_by_two_threads_stores_the_state_of_each(blocking: tuple[bool, bool], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    saved: dict[str, float] = {}

    with context_on(tmp_path) as (context, recorder):

        def save(number: int) -> None:
            for step in range(8):
                value = 1000.0 * number + step
                state = {"weights": torch.full((300_000,), value)}
                saved[context.save(state, {"steps_completed": step}, blocking=blocking[number])] = value

        assert [caller.end() for caller in [Caller(lambda n=n: save(n)) for n in range(2)]] == [None, None]  # type: ignore[misc]
    assert sorted(saved) == sorted(listed(tmp_path / "store")) and len(saved) == 16
    for storage_id, value in saved.items():
        assert set(torch.load(tmp_path / "store" / storage_id / "state.pt")["weights"].tolist()) == {value}
    assert [record["ordinal"] for record in recorder.registered] == list(range(1, 17))


@pytest.mark.parametrize("call", ["upload", "upload in background", "store_path"])
def test_call_of_second_thread_waits_for_open_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = fill(tmp_path / "source")
    monkeypatch.setattr("det_core.core._checkpoint._commit.OPEN_NOTICE_DELAY", 0.0)
    with context_on(tmp_path) as (context, recorder):
        first = context.begin(STEPS)

        def store() -> str:
            with context.store_path(STEPS) as (_, storage_id):
                return storage_id

        second = Caller(
            store if call == "store_path" else lambda: context.upload(source, STEPS, blocking=call == "upload")
        )
        until(lambda: f"waiting for checkpoint {first.storage_id}, which thread 'MainThread' began" in caplog.text)
        first.commit()
        found = second.end()
    assert [record["storage_id"] for record in recorder.registered] == [first.storage_id, found]


def test_call_of_second_thread_with_refuse_raises_busy(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    gate = Gate("write")
    with context_on(tmp_path, disk=gate) as (context, _):
        uploading = Caller(lambda: context.upload(source, STEPS))
        assert gate.reached.wait()
        with pytest.raises(CheckpointBusy, match="another thread is saving a checkpoint"):
            context.begin(STEPS, if_busy="raise")
        gate.opened_up.set()
        assert isinstance(uploading.end(), str)
        handle = context.begin(STEPS)
        refused = Caller(lambda: context.begin(STEPS, if_busy="raise")).end()
        assert isinstance(refused, CheckpointBusy) and handle.storage_id in str(refused)


def test_save_within_an_upload_of_the_same_thread_raises_busy(tmp_path: Path) -> None:
    """As by a signal's handler. To wait would be for ever."""
    found: list[BaseException] = []

    def save(_path: str) -> bool:
        if not found:
            with pytest.raises(CheckpointBusy, match="this very thread") as caught:
                context.upload(source, STEPS)
            found.append(caught.value)
        return True

    source = fill(tmp_path / "source")
    with context_on(tmp_path) as (context, _):
        storage_id = context.upload(source, STEPS, selector=save)
    assert found and listed(tmp_path / "store") == [storage_id]


def test_call_waiting_for_its_turn_ends_when_the_context_is_closed(tmp_path: Path) -> None:
    with context_on(tmp_path) as (context, _):
        context.begin(STEPS)
        waiting = Caller(lambda: context.begin(STEPS))
        once_it_waits(context.close, thread=waiting)
        assert isinstance(waiting.end(), ContextClosed)
    nothing_is_left_over(tmp_path / "store")


def test_checkpoint_of_a_thread_that_ended_is_busy(tmp_path: Path) -> None:
    """Nobody is known to end it, so to wait would be for ever."""
    with context_on(tmp_path) as (context, _):
        handle = Caller(lambda: context.begin(STEPS)).end()
        with pytest.raises(CheckpointBusy, match=f"{handle.storage_id} was begun, and neither committed nor aborted"):
            context.begin(STEPS)
        handle.commit()
        context.begin(STEPS).abort()
    assert listed(tmp_path / "store") == [handle.storage_id]


def test_sharded_and_single_saves_of_two_threads_are_all_stored(tmp_path: Path) -> None:
    """One thread of every rank saves with all, another of the chief's alone."""
    rounds = 5

    def work(distributed: Any) -> list[str]:
        context = Recorder().context(distributed, tmp_path / "store")
        rank = distributed.rank
        source = fill(tmp_path / f"source{rank}", {f"of{rank}": b"x"})

        def shared() -> list[str]:
            steps = [{"steps_completed": step} for step in range(rounds)]
            return [
                context.upload(source, each, shard=True, blocking=each["steps_completed"] % 2 == 0) for each in steps
            ]

        def single() -> list[str]:
            return [context.upload(source, STEPS, blocking=step % 2 == 0) for step in range(rounds)]

        callers = [Caller(shared), *([Caller(single)] if rank == 0 else [])]
        found = [storage_id for caller in callers for storage_id in caller.end()]
        context.close()
        return found

    chief, worker = as_ranks(2, work)
    assert chief[:rounds] == worker
    assert sorted(listed(tmp_path / "store")) == sorted(chief)
    sizes = [len(tree(tmp_path / "store" / storage_id)) for storage_id in chief]
    assert sizes == [3] * rounds + [2] * rounds


class TestNoThread:
    """Where the process has as many threads as it may have."""

    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)

    @pytest.mark.parametrize("call", ["upload", "store_path", "begin"])
    def test_background_save_raises_and_close_returns(self, call: str, full: None, tmp_path: Path) -> None:
        source = fill(tmp_path / "source")
        with context_on(tmp_path) as (context, _):
            with pytest.raises(CheckpointError, match=r"cannot start a thread .*blocking=True"):
                if call == "upload":
                    context.upload(source, STEPS, blocking=False)
                elif call == "store_path":
                    with context.store_path(STEPS, blocking=False):
                        pass
                else:
                    handle = context.begin(STEPS)
                    handle.commit(blocking=False)
            if call == "begin":
                with pytest.raises(CheckpointError, match="cannot start a thread"):
                    handle.wait()
            context.close()
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_blocking_save_and_abort_need_no_thread(self, full: None, tmp_path: Path) -> None:
        source = fill(tmp_path / "source", {**FILES, "large": b"x" * 300_000})
        with context_on(tmp_path) as (context, _):
            context.begin(STEPS).abort(blocking=False)
            storage_id = context.upload(source, STEPS)
        assert listed(tmp_path / "store") == [storage_id]
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_failure_to_start_a_thread_on_one_rank_reaches_all(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "det_core-upload" and threading.current_thread() is refused[0]:
                raise RuntimeError("can't start new thread")
            start(thread)

        refused: list[threading.Thread] = []
        monkeypatch.setattr(threading.Thread, "start", refuse)

        def work(distributed: Any) -> str:
            context = Recorder().context(distributed, tmp_path / "store")
            if distributed.rank == 1:
                refused.append(threading.current_thread())
            distributed.allgather(None)
            with pytest.raises(CheckpointError) as caught:
                with context.store_path(STEPS, shard=True, blocking=False):
                    pass
                context.close()
            context.close()
            return str(caught.value)

        told = as_ranks(2, work)
        assert "rank 1: " in told[0] and all("cannot start a thread" in text for text in told)
        nothing_is_left_over(tmp_path / "store", restart=0)


class TestWait:
    """``ctx.checkpoint.wait()``."""

    def test_wait_returns_when_nothing_is_being_saved(self, tmp_path: Path) -> None:
        gate = Gate()
        with context_on(tmp_path, disk=gate) as (context, recorder):
            assert context.wait() and context.wait(0)
            storage_id = context.upload(fill(tmp_path / "source"), STEPS, blocking=False)
            assert gate.reached.wait()
            assert not context.wait(0.01)
            gate.opened_up.set()
            assert context.wait()
            assert [record["storage_id"] for record in recorder.registered] == [storage_id]
            with context.store_path(STEPS):
                assert context.wait(), "one that is written is not waited for"
        with pytest.raises(ContextClosed):
            context.wait()

    def test_wait_raises_once_why_a_save_failed(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, _):
            with context.store_path({**STEPS}, blocking=False) as (path, storage_id):
                path.rmdir()
            with pytest.raises(CheckpointError, match=f"{storage_id} was not saved in the background: .* was removed"):
                context.wait()
            assert context.wait()
