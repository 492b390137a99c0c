"""``save()``: a state of torch as it was when the call returned, whoever writes it and whatever happens to him."""

from __future__ import annotations

import copy
import copyreg
import gc
import json
import logging
import math
import os
import signal
import sys
import time
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.core._checkpoint._aside._archive import Archive, _central, _end, _local
from det_core.errors import CheckpointBusy, CheckpointConflict, CheckpointError, ContextClosed, StorageError
from support import TESTS, nest, scripts
from support.checkpoints import STEPS, Recorder, alone, listed, nothing_is_left_over, tree
from support.disks import Gate
from support.processes import until
from support.ranks import running
from support.servers import S3Server

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@contextmanager
def context_on(folder: Path, **options: Any) -> Iterator[tuple[CheckpointContext, Recorder]]:
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, folder / "store", **options)
        try:
            yield context, recorder
        finally:
            context.close()


def load(folder: Path, storage_id: str, **options: Any) -> Any:
    return torch.load(folder / "store" / storage_id / "state.pt", **options)


def helper(context: CheckpointContext) -> int:
    """The process that saves."""
    saver = context._writer._states._saver
    assert saver is not None and saver.pid is not None
    return saver.pid


def wait_for(recorder: Recorder, count: int) -> None:
    until(lambda: len(recorder.registered) >= count)


def odd_state() -> dict[str, Any]:
    """All kinds of tensors, and what lies around them."""
    base = torch.arange(12.0)
    tied = torch.nn.Linear(3, 3)
    return {
        "model": {"a": tied.weight, "b": tied.weight, "bias": tied.bias.detach()},
        "views": [base[2:5], base.reshape(3, 4).t(), base[::2], base],
        "types": [torch.ones(3, dtype=d) for d in (torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16)],
        "complex": torch.ones(2, dtype=torch.complex64),
        "conjugated": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "sparse": torch.eye(3).to_sparse(),
        "channels_last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "requires_grad": torch.ones(2, requires_grad=True),
        "rest": (1, 2.5, "text", None, True, b"bytes", {1: {2: [3]}}),
    }


class Odd:
    """Something that torch knows nothing of."""

    def __init__(self, number: int) -> None:
        self.number = number


def _untouched(grad: torch.Tensor) -> torch.Tensor:
    return grad


ODD = {"complex", "conjugated", "unsigned", "sparse"}
"""What of it is left to torch, and with it all tensors of its state."""


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        same = a.dtype is b.dtype and a.stride() == b.stride() and a.requires_grad == b.requires_grad
        return type(a) is type(b) and same and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


class TestWhatIsSaved:
    """The file."""

    @pytest.mark.parametrize("blocking", [True, False])
    def test_it_comes_back_as_it_was(self, blocking: bool, tmp_path: Path) -> None:
        state = odd_state()
        with context_on(tmp_path) as (context, recorder):
            storage_id = context.save(state, {**STEPS, "more": [1]}, blocking=blocking)
        for options in ({}, {"weights_only": True}, {"mmap": True}, {"weights_only": False}):
            found = load(tmp_path, storage_id, **options)
            assert equal(state, found)
            assert found["model"]["a"].data_ptr() == found["model"]["b"].data_ptr(), "tied weights are one"
            found["views"][3][2] = -1
            assert found["views"][0][0] == -1 and found["views"][2][1] == -1, "views of one storage are"
        assert listed(tmp_path / "store") == [storage_id]
        assert set(tree(tmp_path / "store" / storage_id)) == {"state.pt", "metadata.json"}
        (record,) = recorder.registered
        assert record["steps_completed"] == 3 and record["metadata"] == {**STEPS, "more": [1]}
        assert record["ordinal"] == 1 and record["resources"].keys() == {"state.pt", "metadata.json"}
        with zipfile.ZipFile(tmp_path / "store" / storage_id / "state.pt") as archive:
            assert archive.testzip() is None
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_each_kind_alone(self, tmp_path: Path) -> None:
        from det_core.core._checkpoint._aside._pickling import Pickling

        ids = {}
        with context_on(tmp_path) as (context, _):
            for kind, state in (states := odd_state()).items():
                pickling = Pickling()
                pickling.pickle(state)
                assert pickling._thorough == (kind in ODD)
                ids[kind] = [context.save(state, STEPS, blocking=False) for _ in range(2)]
        for kind, saved in ids.items():
            for storage_id in saved:
                assert equal(states[kind], load(tmp_path, storage_id, weights_only=True)), kind

    def test_tensors_that_look_different_the_next_time(self, tmp_path: Path) -> None:
        """What tensors become in the pickle is kept: for the same tensors, not for what they are next."""
        state = {name: torch.arange(12.0) for name in ("resized", "set", "strided", "grad", "as before", "data")}
        beside = torch.arange(40.0)
        changes = [
            lambda: state["resized"].resize_(3, 2),
            lambda: state["set"].set_(beside.untyped_storage(), 5, (2, 3), (10, 1)),
            lambda: state["strided"].as_strided_((2, 2), (1, 3), 1),
            lambda: state["grad"].requires_grad_(),
            lambda: setattr(state["data"], "data", torch.arange(3, dtype=torch.int16)),
            lambda: state["as before"].untyped_storage().resize_(4 * 20),
            lambda: state.update(more=beside),
            lambda: state.update(more=beside.double()),
        ]
        expected = []
        with context_on(tmp_path) as (context, _):
            for change in changes:
                change()
                expected.append(copy.deepcopy({name: t.detach().clone() for name, t in state.items()}))
                storage_id = context.save(state, STEPS, blocking=False)
                file = tmp_path / "by_torch.pt"
                torch.save(state, file)
                context.save({}, STEPS, blocking=False)  # waits for the one before
                found, by_torch = load(tmp_path, storage_id), torch.load(file)
                assert equal(by_torch, found) and equal(list(state.values()), list(found.values()))
                assert all(
                    found[name].untyped_storage().nbytes() == by_torch[name].untyped_storage().nbytes()
                    for name in found
                )

    def test_metadata_that_is_not_finite(self, tmp_path: Path) -> None:
        metadata = {**STEPS, "loss": math.nan, "best": -math.inf, "none": None}
        with context_on(tmp_path) as (context, recorder):
            ids = [context.save({"a": torch.ones(1)}, metadata, blocking=blocking) for blocking in (True, False)]
        for storage_id, record in zip(ids, recorder.registered, strict=True):
            stored = json.loads((tmp_path / "store" / storage_id / "metadata.json").read_text())
            assert repr(stored) == repr(metadata) == repr(record["metadata"])

    @pytest.mark.filterwarnings("ignore:backward hook")
    def test_tensors_that_become_special(self, tmp_path: Path) -> None:
        saved = {}
        with context_on(tmp_path) as (context, _):
            for special in ("negative", "hook", "attribute"):
                tensor = torch.arange(4.0)
                state = [tensor, torch.ones(3)]
                context.save(state, STEPS, blocking=False)
                if special == "negative":
                    state[0] = tensor = torch.complex(tensor, tensor).conj().imag
                    assert tensor.is_neg()
                elif special == "hook":
                    tensor.requires_grad_()
                    tensor.register_hook(_untouched)
                else:
                    tensor.note = "kept"
                saved[special] = tensor, context.save(state, STEPS, blocking=False)
        for special, (tensor, storage_id) in saved.items():
            found = load(tmp_path, storage_id, weights_only=False)
            assert torch.equal(found[0], tensor)
            assert found[0].is_neg() == tensor.is_neg()
            assert getattr(found[0], "note", "") == ("kept" if special == "attribute" else "")

    def test_classes_that_are_registered_between_two(self, tmp_path: Path) -> None:
        """``copyreg`` counts from the next save on, also for what had a way before."""
        state = {"odd": Odd(1), "tensor": torch.ones(2)}
        with context_on(tmp_path) as (context, _):
            before = context.save(state, STEPS, blocking=False)
            copyreg.pickle(Odd, lambda odd: (Odd, (odd.number + 1,)))
            try:
                after = context.save(state, STEPS, blocking=False)
            finally:
                del copyreg.dispatch_table[Odd]
        numbers = [load(tmp_path, i, weights_only=False)["odd"].number for i in (before, after)]
        assert numbers == [1, 2]

    def test_what_cannot_be_pickled_is_forgotten(self, tmp_path: Path) -> None:
        """The next state is whole, and nothing of the failed one is kept."""
        kept = torch.ones(5)
        seen = weakref.ref(kept)
        with context_on(tmp_path) as (context, _):
            with pytest.raises(Exception, match="pickle"):
                context.save([kept, lambda: 1], STEPS, blocking=False)
            storage_id = context.save([torch.zeros(2)], STEPS, blocking=False)
            del kept
            gc.collect()
            assert seen() is None
        assert equal([torch.zeros(2)], load(tmp_path, storage_id))

    def test_what_changes_after_the_call_does_not_reach_it(self, tmp_path: Path) -> None:
        weights, steps = torch.arange(100_000.0), [0]
        metadata: dict[str, Any] = {"steps_completed": 0}
        with context_on(tmp_path) as (context, recorder):
            ids = []
            for i in range(20):
                state = {"weights": weights, "steps": steps, "part": weights[i:], "grown": torch.full((i * 9999,), i)}
                ids.append(context.save(state, metadata, blocking=False))
                weights.add_(1)
                state["grown"].zero_()
                steps.append(i)
                metadata["steps_completed"] += 1
        assert [record["steps_completed"] for record in recorder.registered] == list(range(20))
        assert [record["storage_id"] for record in recorder.registered] == ids
        assert [record["ordinal"] for record in recorder.registered] == list(range(1, 21))
        for i, storage_id in enumerate(ids):
            found = load(tmp_path, storage_id)
            assert torch.equal(found["weights"], torch.arange(100_000.0) + i)
            assert len(found["steps"]) == i + 1 and bool((found["grown"] == i).all())
        assert listed(tmp_path / "store") == ids

    @pytest.mark.filterwarnings("ignore:TypedStorage")
    def test_storages_outside_of_tensors(self, tmp_path: Path) -> None:
        base, marked = torch.arange(6.0), torch.ones(2)
        marked.note = "a tensor with an attribute has its storage in a place of its own"
        state = {"base": base, "typed": base.storage(), "untyped": torch.arange(3).untyped_storage(), "marked": marked}
        with context_on(tmp_path) as (context, _):
            ids = [context.save(state, STEPS, blocking=False) for _ in range(2)]
        for storage_id in ids:
            found = load(tmp_path, storage_id, weights_only=False)
            assert found["typed"].tolist() == base.tolist() and found["typed"].data_ptr() == found["base"].data_ptr()
            assert found["untyped"].tolist() == torch.arange(3).untyped_storage().tolist()
            assert torch.equal(found["marked"], marked) and found["marked"].note == marked.note

    def test_integers_of_every_length_beside_tensors(self, tmp_path: Path) -> None:
        """In the pickle a storage's name first has the place of a large integer."""
        numbers = [sign * 2**i for i in range(0, 130, 3) for sign in (1, -1)]
        state = [item for number in numbers for item in (number, torch.tensor([float(number % 97)]))]
        with context_on(tmp_path) as (context, _):
            storage_id = context.save(state, STEPS, blocking=False)
        assert equal(state, load(tmp_path, storage_id))

    @pytest.mark.filterwarnings("ignore:TypedStorage")
    def test_what_only_torch_can_save_is_saved_by_it(self, tmp_path: Path) -> None:
        """Two types in one storage: refused by torch, and so here."""
        base = torch.zeros(4)
        with context_on(tmp_path) as (context, _):
            with pytest.raises(RuntimeError, match="different types"):
                context.save([base, base.view(torch.int32)], STEPS, blocking=False)
            with pytest.raises(Exception, match="pickle"):
                context.save({"function": lambda: 1}, STEPS, blocking=False)
            legacy = context.save([torch.FloatStorage([1.0, 2.0])], STEPS, blocking=False)
        assert load(tmp_path, legacy, weights_only=False)[0].tolist() == [1.0, 2.0]
        assert listed(tmp_path / "store") == [legacy]

    def test_names(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, recorder):
            for name in ("", "/etc/passwd", "../x", "metadata.json", ".det_core/x"):
                with pytest.raises(ValueError, match="name="):
                    context.save({}, STEPS, name=name, blocking=False)
            for blocking in (True, False):
                context.save({}, STEPS, name="a/b/weights.pt", blocking=blocking)
            with pytest.raises(ValueError, match="steps_completed"):
                context.save({}, {}, blocking=False)
        assert [set(record["resources"]) for record in recorder.registered] == [
            {"a/", "a/b/", "a/b/weights.pt", "metadata.json"}
        ] * 2

    def test_a_bucket(self, tmp_path: Path, moto_server: S3Server) -> None:
        from det_core.core._checkpoint import CheckpointCache
        from det_core.storage import open_store

        store = open_store(moto_server.storage(moto_server.make_bucket(), "prefix"), default=tmp_path)
        weights = torch.arange(1000.0)
        try:
            with context_on(tmp_path, store=store, cache=CheckpointCache(tmp_path / "cache", 1 << 30)) as (context, _):
                first = context.save({"weights": weights}, STEPS, blocking=False)
                weights.zero_()
                context.save({"weights": weights}, STEPS)
                with context.restore_path(first) as path:
                    assert torch.equal(torch.load(path / "state.pt")["weights"], torch.arange(1000.0))
        finally:
            store.close()

    def test_numbers_beyond_four_bytes(self) -> None:
        """Where a record, its place or the directory is that large, its ZIP64 field says so."""
        archive = Archive([5 << 30, 8]).with_pickle(10)
        large, small = archive.records[:2]
        assert large.start % 64 == 0 and small.start % 64 == 0 and small.header > 5 << 30
        assert len(_local(large, 0)) == large.start - large.header
        assert (5 << 30).to_bytes(8, "little") in _local(large, 0)
        assert _central(small, 0).endswith(small.header.to_bytes(8, "little"))
        assert _end(5, 100, 6 << 30).startswith(b"PK\x06\x06") and _end(5, 100, 6).startswith(b"PK\x05\x06")


class TestTheHelper:
    """The process beside this one."""

    def test_one_is_enough_and_it_ends_with_the_context(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, recorder):
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 1)
            first = helper(context)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(first, number)
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 2)
            assert helper(context) == first
        assert not os.path.exists(f"/proc/{first}")

    def test_its_death_is_told_and_another_one_is_started(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, recorder):
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 1)
            first = helper(context)
            os.kill(first, signal.SIGSTOP)
            lost = context.save({}, STEPS, blocking=False)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(CheckpointError, match=f"{lost} was not saved.*killed by signal 9"):
                context.save({}, STEPS, blocking=False)
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 2)
            assert helper(context) != first
        assert lost not in listed(tmp_path / "store")
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_the_next_waits_or_is_refused(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, recorder):
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 1)
            os.kill(helper(context), signal.SIGSTOP)
            context.save({}, STEPS, blocking=False)
            with pytest.raises(CheckpointBusy):
                context.save({}, STEPS, blocking=False, if_busy="refuse")
            os.kill(helper(context), signal.SIGCONT)
            context.save({}, STEPS, blocking=False)
        assert len(listed(tmp_path / "store")) == 3

    def test_one_that_hangs_does_not_hold_a_preempted_process(self, tmp_path: Path) -> None:
        deadline: list[float] = []
        with context_on(tmp_path, deadline=lambda: deadline[0] if deadline else None) as (context, recorder):
            saved = context.save({}, STEPS, blocking=False)
            wait_for(recorder, 1)
            hanging = helper(context)
            os.kill(hanging, signal.SIGSTOP)
            lost = context.save({}, STEPS, blocking=False)
            deadline.append(time.monotonic() + 0.3)
            with pytest.raises(CheckpointError, match=f"{lost} was not saved.*the newest that is saved is {saved}"):
                context.close()
        assert listed(tmp_path / "store") == [saved]
        assert not os.path.exists(f"/proc/{hanging}")
        nothing_is_left_over(tmp_path / "store", restart=0)

    def test_what_the_disk_refuses_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "store").write_text("a file")
        with context_on(tmp_path) as (context, recorder):
            lost = context.save({}, STEPS, blocking=False)
            with pytest.raises(StorageError, match=f"{lost} was not saved.*cannot make folder .*store"):
                context.close()
        assert recorder.registered == []

    def test_without_one_a_thread_saves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with context_on(tmp_path) as (context, _), monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            ids = [context.save(odd_state(), STEPS, blocking=False) for _ in range(3)]
            context.close()
        assert listed(tmp_path / "store") == ids
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "saved in the background by this process" in warning and "it ended with status 1" in warning

    def test_without_shared_memory_a_thread_saves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "memfd_create", refuse)
        with context_on(tmp_path) as (context, _):
            storage_id = context.save({"weights": torch.arange(9.0)}, STEPS, blocking=False)
        assert torch.equal(load(tmp_path, storage_id)["weights"], torch.arange(9.0))
        assert "can share no memory" in caplog.text

    def test_it_returns_before_it_is_saved(self, tmp_path: Path) -> None:
        with context_on(tmp_path, disk=(gate := Gate())) as (context, recorder):
            storage_id = context.save({"a": 1}, STEPS, blocking=False)
            assert gate.reached.wait()
            assert listed(tmp_path / "store") == [] and recorder.registered == []
            gate.opened_up.set()
        assert listed(tmp_path / "store") == [storage_id]

    def test_a_forked_child_leaves_it_to_its_parent(self, tmp_path: Path) -> None:
        with context_on(tmp_path) as (context, recorder):
            context.save({}, STEPS, blocking=False)
            wait_for(recorder, 1)
            pid = os.fork()
            if pid == 0:
                try:
                    context.save({}, STEPS, blocking=False)
                except ContextClosed:
                    context.close()
                    os._exit(3)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            context.save({}, STEPS, blocking=False)
        assert len(listed(tmp_path / "store")) == 2

    @pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    def test_it_ends_with_a_script_that_never_closes(self, end: str, tmp_path: Path) -> None:
        script = f"""
import time, warnings
warnings.simplefilter("error")
from pathlib import Path
from support.checkpoints import Recorder, alone
recorder = Recorder()
context = recorder.context(alone(), Path({str(tmp_path / "store")!r}))
context.save({{"a": 1}}, {{"steps_completed": 1}}, blocking=False)
while not recorder.registered:
    time.sleep(0.01)
helper = context._writer._states._saver.pid
context.save({{"a": 2}}, {{"steps_completed": 2}}, blocking=False)
print(helper, flush=True)
{end}
"""
        done = scripts.run(script, tmp_path)
        assert done.returncode == (-9 if end else 0), done.stdout
        until(lambda: not nest.runs(int(done.stdout)))  # and nothing else was said
        assert len(listed(tmp_path / "store")) in ((1, 2) if end else (2,))
        nothing_is_left_over(tmp_path / "store")


RANKS = """
import sys, torch
from pathlib import Path
from det_core import core
from support.checkpoints import Recorder

with core.DistributedContext.from_torch_distributed() as distributed:
    recorder = Recorder()
    context = recorder.context(distributed, Path(sys.argv[1]))
    rank = distributed.rank
    for step in range(1, 4):
        weights = torch.full((1000,), rank + 10.0 * step)
        context.save({"weights": weights}, {"steps_completed": step}, name=f"{rank}.pt", shard=True, blocking=False)
        weights.zero_()
    context.save({"weights": weights + rank}, {"steps_completed": 4}, shard=True, blocking=False)
    try:
        context.close()
    except Exception as e:
        print("told", type(e).__name__, e, flush=True)
"""


def test_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    """Each its own file, by a helper of its own; a name that two give with different content is refused."""
    environment = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with running(RANKS, 2, tmp_path, env=environment, args=(str(tmp_path / "store"),)) as ranks:
        assert ranks.wait() == [0, 0], [ranks.output(rank)[-2000:] for rank in range(2)]
        for rank in range(2):
            assert f"told {CheckpointConflict.__name__}" in ranks.output(rank)
            assert "ranks disagree on state.pt (ranks 0, 1)" in ranks.output(rank)
    found = listed(tmp_path / "store")
    assert len(found) == 3
    for step, storage_id in enumerate(found, 1):
        for rank in range(2):
            weights = torch.load(tmp_path / "store" / storage_id / f"{rank}.pt")["weights"]
            assert torch.equal(weights, torch.full((1000,), rank + 10.0 * step))
    nothing_is_left_over(tmp_path / "store")
