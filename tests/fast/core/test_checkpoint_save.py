"""``save()``: a state of torch as it was when the call returned."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointConflict, CheckpointError, StorageError
from det_core.storage import open_store
from support.checkpoints import STEPS, Recorder, alone, listed, nothing_is_left_over, tree
from support.disks import Gate, small_disk
from support.servers import S3Server
from support.threads import as_ranks

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


def odd_state() -> dict[str, Any]:
    """All kinds of tensors, and what lies around them."""
    base = torch.arange(12.0)
    tied = torch.nn.Linear(3, 3)
    return {
        "model": {"a": tied.weight, "b": tied.weight, "bias": tied.bias.detach(), "again": tied.state_dict()["weight"]},
        "views": [base[2:5], base.reshape(3, 4).t(), base[::2], base],
        "types": [torch.ones(3, dtype=d) for d in (torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16)],
        "complex": torch.ones(2, dtype=torch.complex64),
        "conjugated": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "negative": torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "sparse": torch.eye(3).to_sparse(),
        "channels_last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "requires_grad": torch.ones(2, requires_grad=True),
        "computed": torch.ones(2, requires_grad=True) * 3,
        "computed_sparse": (torch.eye(2, requires_grad=True) * 3).to_sparse(),
        "rest": (1, 2.5, "text", None, True, b"bytes", {1: {2: [3]}}),
    }


class Holder:
    """An object that has a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        same = a.dtype is b.dtype and a.requires_grad == b.requires_grad
        return type(a) is type(b) and same and (a.is_neg() or a.stride() == b.stride()) and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("blocking", [True, False])
def test_it_comes_back_as_it_was(blocking: bool, tmp_path: Path) -> None:
    state = odd_state()
    with context_on(tmp_path) as (context, recorder):
        storage_id = context.save(state, {**STEPS, "more": [1]}, blocking=blocking)
        again = context.save(state, STEPS, blocking=blocking)
    torch.save(state, tmp_path / "by_torch.pt")
    for options in ({}, {"weights_only": True}, {"mmap": True}, {"weights_only": False}):
        found = load(tmp_path, storage_id, **options)
        assert equal(torch.load(tmp_path / "by_torch.pt", **options), found)
        assert len({found["model"][name].data_ptr() for name in ("a", "b", "again")}) == 1, "tied weights are one"
        found["views"][3][2] = -1
        assert found["views"][0][0] == -1 and found["views"][2][1] == -1, "views of one storage are"
    assert equal(torch.load(tmp_path / "by_torch.pt"), load(tmp_path, again)), "the memory that was kept serves anew"
    sizes = [path.stat().st_size for path in (tmp_path / "store").glob("*/state.pt")]
    assert max(sizes) <= (tmp_path / "by_torch.pt").stat().st_size * 1.05, "no storage is saved twice"
    assert listed(tmp_path / "store") == [storage_id, again]
    assert set(tree(tmp_path / "store" / storage_id)) == {"state.pt", "metadata.json"}
    record = recorder.registered[0]
    assert record["steps_completed"] == 3 and record["metadata"] == {**STEPS, "more": [1]}
    assert record["ordinal"] == 1 and record["resources"].keys() == {"state.pt", "metadata.json"}
    nothing_is_left_over(tmp_path / "store", restart=0)


def test_tensors_that_look_different_the_next_time(tmp_path: Path) -> None:
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
        lambda: state.pop("more"),
    ]
    with context_on(tmp_path) as (context, _):
        for change in changes:
            change()
            storage_id = context.save(state, STEPS, blocking=False)
            torch.save(state, tmp_path / "by_torch.pt")
            context.begin(STEPS).abort()  # waits for the one before
            found, by_torch = load(tmp_path, storage_id), torch.load(tmp_path / "by_torch.pt")
            assert equal(by_torch, found)
            assert all(found[n].untyped_storage().nbytes() == t.untyped_storage().nbytes() for n, t in by_torch.items())


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.device("meta")], ids=["inference", "default device"])
def test_modes_of_torch(mode: Any, tmp_path: Path) -> None:
    state = {"weight": torch.nn.Parameter(torch.zeros(3)), "view": torch.zeros(4)[1:], "plain": torch.zeros(2)}
    with context_on(tmp_path) as (context, _):
        for each in (mode, torch.enable_grad()):  # the second time uses what was made the first time
            with each:
                storage_id = context.save(state, STEPS, blocking=False)
            context.begin(STEPS).abort()  # waits for the one before
            assert equal(state, load(tmp_path, storage_id))
            state["plain"].add_(1)


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_tensors_in_objects_and_storages(tmp_path: Path) -> None:
    base, marked = torch.arange(6.0), torch.ones(2)
    marked.note = "kept"
    state = {"base": base, "typed": base.storage(), "marked": marked}
    state["holder"] = Holder(base[2:])
    with context_on(tmp_path) as (context, _):
        storage_id = context.save(state, STEPS, blocking=False)
        base.zero_()
    found = load(tmp_path, storage_id, weights_only=False)
    assert found["base"].tolist() == found["typed"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["holder"].tensor.tolist() == [2, 3, 4, 5]
    assert found["typed"].data_ptr() == found["base"].data_ptr() == found["holder"].tensor.data_ptr() - 8
    assert found["marked"].note == "kept"


class Fresh(Mapping[str, torch.Tensor]):
    """Makes its tensors when they are asked for."""

    def __init__(self, begin: int) -> None:
        self._begin = begin

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.tensor([0, self._begin + int(key)])[1:]

    def __iter__(self) -> Iterator[str]:
        return iter("0123")

    def __len__(self) -> int:
        return 4

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


def test_a_mapping_that_makes_its_tensors_anew(tmp_path: Path) -> None:
    with context_on(tmp_path) as (context, _):
        for _ in "ab":  # the second time uses what was made the first time
            storage_id = context.save({n: Fresh(n) for n in range(0, 400, 10)}, STEPS, blocking=False)
    found = load(tmp_path, storage_id)
    assert found == {n: {key: torch.tensor([n + int(key)]) for key in "0123"} for n in range(0, 400, 10)}


def test_what_changes_after_the_call_does_not_reach_it(tmp_path: Path) -> None:
    weights, steps = torch.arange(100_000.0), [0]
    metadata: dict[str, Any] = {"steps_completed": 0}
    expected = []
    with context_on(tmp_path) as (context, recorder):
        ids = []
        for i in range(10):
            state = {"weights": weights, "steps": steps, "part": weights[i:], "grown": torch.full((i * 9999,), i)}
            expected.append(copy.deepcopy(state))
            ids.append(context.save(state, metadata, blocking=False))
            weights.add_(1)
            state["grown"].zero_()
            steps.append(i)
            metadata["steps_completed"] += 1
    assert [record["steps_completed"] for record in recorder.registered] == list(range(10))
    assert [record["ordinal"] for record in recorder.registered] == list(range(1, 11))
    assert [record["storage_id"] for record in recorder.registered] == listed(tmp_path / "store") == ids
    assert all(equal(a, load(tmp_path, i)) for a, i in zip(expected, ids, strict=True))


class Bare(torch.Tensor):
    """A subclass that torch can pickle, and not copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.new_empty:
            raise NotImplementedError("no new_empty")
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["csr", "nested", "subclass"])
def test_save_in_background_takes_what_cannot_be_copied(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "csr":
        tensor = torch.eye(3).to_sparse_csr()
    elif kind == "nested":
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    else:
        tensor = torch.ones(3).as_subclass(Bare)
    weights = torch.zeros(3)
    with context_on(tmp_path) as (context, _):
        ids = []
        for _ in "ab":
            ids.append(context.save({"odd": tensor, "weights": weights}, STEPS, blocking=False))
            weights.add_(1)
        ids.append(context.save({"weights": weights}, STEPS, blocking=False))
    assert listed(tmp_path / "store") == ids
    found = [load(tmp_path, storage_id, weights_only=False) for storage_id in ids]
    assert [each["weights"].tolist() for each in found] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert type(found[0]["odd"]) is type(tensor) and found[0]["odd"].layout is tensor.layout
    *unreadable, warning = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("save(blocking=False) writes the state in the call, as it cannot be copied: ")
    assert ["will not read state['odd'] (" in text for text in unreadable] == [True] * (kind == "subclass")


def test_metadata_that_is_not_finite(tmp_path: Path) -> None:
    metadata = {**STEPS, "loss": math.nan, "best": -math.inf, "none": None}
    with context_on(tmp_path) as (context, recorder):
        ids = [context.save({"a": torch.ones(1)}, metadata, blocking=blocking) for blocking in (True, False)]
    for storage_id, record in zip(ids, recorder.registered, strict=True):
        stored = json.loads((tmp_path / "store" / storage_id / "metadata.json").read_text())
        assert repr(stored) == repr(metadata) == repr(record["metadata"])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """Objects that cannot be copied fail the call, those that cannot be pickled the next; the one after is intact."""
    with context_on(tmp_path) as (context, _):
        with pytest.raises(TypeError, match="cannot pickle"):
            context.save([torch.ones(5), threading.Lock()], STEPS, blocking=False)
        with pytest.raises(Exception, match="pickle"):
            context.save([torch.ones(5), lambda: 1], STEPS)
        lost = context.save([torch.ones(5), lambda: 1], STEPS, blocking=False)
        with pytest.raises(CheckpointError, match=f"{lost} was not saved in the background: .*pickle"):
            context.save([torch.ones(5)], STEPS, blocking=False)
        storage_id = context.save([torch.zeros(2)], STEPS, blocking=False)
    assert equal([torch.zeros(2)], load(tmp_path, storage_id))
    assert listed(tmp_path / "store") == [storage_id]
    nothing_is_left_over(tmp_path / "store", restart=0)


def test_names(tmp_path: Path) -> None:
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


def test_a_bucket(tmp_path: Path, moto_server: S3Server) -> None:
    store = open_store(moto_server.storage(moto_server.make_bucket(), "prefix"), default=tmp_path, scratch=tmp_path)
    weights = torch.arange(1000.0)
    try:
        with context_on(tmp_path, store=store) as (context, _):
            first = context.save({"weights": weights}, STEPS, blocking=False)
            weights.zero_()
            context.save({"weights": weights}, STEPS)
            with context.restore_path(first) as path:
                assert torch.equal(torch.load(path / "state.pt")["weights"], torch.arange(1000.0))
            assert not path.exists()
    finally:
        store.close()


def test_it_returns_before_it_is_saved(tmp_path: Path) -> None:
    with context_on(tmp_path, disk=(gate := Gate())) as (context, recorder):
        storage_id = context.save({"a": 1}, STEPS, blocking=False)
        assert gate.reached.wait()
        assert listed(tmp_path / "store") == [] and recorder.registered == []
        gate.opened_up.set()
    assert listed(tmp_path / "store") == [storage_id]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_disk_that_is_full(blocking: bool, tmp_path: Path) -> None:
    """torch hides what its file says; the error has the number, the path, and what to know."""
    with small_disk(tmp_path / "small", "2m") as disk, alone() as distributed:
        context = Recorder().context(distributed, disk / "store")
        with pytest.raises(StorageError, match=r"cannot write .*state\.pt: No space left") as caught:
            context.save({"a": torch.ones(1_000_000)}, STEPS, blocking=blocking)
            context.close()
        assert caught.value.errno == 28
        saved = context.save({"a": torch.ones(10)}, STEPS) if blocking else None
        context.close()
        assert listed(disk / "store") == ([saved] if saved else [])
        nothing_is_left_over(disk / "store", restart=0)


def test_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    """Each its own file; a name that two give with different content is refused."""

    def work(distributed: Any) -> list[str]:
        context = Recorder().context(distributed, tmp_path / "store")
        rank, ids = distributed.rank, []
        for step in range(1, 4):
            weights = torch.full((1000,), rank + 10.0 * step)
            how: dict[str, Any] = {"name": f"{rank}.pt", "shard": True, "blocking": False}
            ids.append(context.save({"weights": weights}, {"steps_completed": step}, **how))
            weights.zero_()
        context.save({"weights": weights + rank}, {"steps_completed": 4}, shard=True, blocking=False)
        with pytest.raises(CheckpointConflict, match=r"ranks disagree on state.pt \(ranks 0, 1\)"):
            context.close()
        return ids

    ids, others = as_ranks(2, work)
    assert ids == others == listed(tmp_path / "store")
    for step, storage_id in enumerate(ids, 1):
        for rank in range(2):
            weights = torch.load(tmp_path / "store" / storage_id / f"{rank}.pt")["weights"]
            assert torch.equal(weights, torch.full((1000,), rank + 10.0 * step))
    nothing_is_left_over(tmp_path / "store")
