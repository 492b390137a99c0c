"""Limits, the average of weights, functions of one rank, workers' seeds, padding."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from support import TESTS

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

from det_core._env import Environment  # noqa: E402
from det_core.accelerated.utils import (  # noqa: E402
    LIMIT_BATCHES_ENV_VAR,
    DataLoaderSlice,
    LimitBatches,
    ModelEma,
    local_process_zero_first,
    local_process_zero_only,
    remove_padding,
    worker_init_fn,
    world_process_zero_only,
)
from support.ranks import running  # noqa: E402


def test_case_34_the_limit_is_set_and_the_earlier_one_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT_BATCHES_ENV_VAR == "PT_ACC_LIMIT_BATCHES"
    monkeypatch.delenv(LIMIT_BATCHES_ENV_VAR, raising=False)
    with LimitBatches(2):
        assert os.environ[LIMIT_BATCHES_ENV_VAR] == "2" and Environment.read().limit_batches == 2
    assert LIMIT_BATCHES_ENV_VAR not in os.environ and Environment.read().limit_batches is None

    monkeypatch.setenv(LIMIT_BATCHES_ENV_VAR, "7")
    limit = LimitBatches(2)
    for _ in range(2):
        with pytest.raises(RuntimeError), limit:
            with LimitBatches(1):
                assert os.environ[LIMIT_BATCHES_ENV_VAR] == "1"
            with limit:
                pass
            assert os.environ[LIMIT_BATCHES_ENV_VAR] == "2"
            raise RuntimeError
        assert os.environ[LIMIT_BATCHES_ENV_VAR] == "7"


def test_the_limit_is_read() -> None:
    assert Environment.read({LIMIT_BATCHES_ENV_VAR: "none"}).limit_batches is None
    assert Environment.read({LIMIT_BATCHES_ENV_VAR: ""}).limit_batches is None
    for wrong in ("few", "-1", "1.5"):
        with pytest.raises(ValueError, match=f"PT_ACC_LIMIT_BATCHES='{wrong}': expected a number of batches, 0 or"):
            Environment.read({LIMIT_BATCHES_ENV_VAR: wrong})


# DataLoaderSlice


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Any:
        for i in range(1000):
            self.taken += 1
            yield i


def test_a_slice_gives_the_first_batches_each_time() -> None:
    loader = DataLoader(list(range(10)), batch_size=2)
    part = DataLoaderSlice(loader, 2)
    assert len(part) == 2
    for _ in range(2):
        assert [batch.tolist() for batch in part] == [[0, 1], [2, 3]]
    assert part.batch_sampler is loader.batch_sampler and part.batch_size == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing
    assert len(pickle.loads(pickle.dumps(part))) == 2


def test_a_slice_that_is_larger_than_the_loader() -> None:
    part = DataLoaderSlice(DataLoader(list(range(4)), batch_size=2), 9)
    assert len(part) == 2 and len(list(part)) == 2


def test_a_slice_of_a_stream_takes_no_more_than_it_gives() -> None:
    stream = Stream()
    part = DataLoaderSlice(DataLoader(stream, batch_size=2), 3)
    assert [batch.tolist() for batch in part] == [[0, 1], [2, 3], [4, 5]]
    assert stream.taken == 6
    with pytest.raises(TypeError):
        len(part)


# ModelEma


class Varied(nn.Module):  # type: ignore[misc]
    """Parameters, one of them in two places; buffers that average and buffers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("index", torch.tensor([2**40 + 1, 5]))
        self.register_buffer("mask", torch.tensor([True, False]))

    def get_extra_state(self) -> Any:
        return {"some": "thing"}

    def set_extra_state(self, state: Any) -> None: ...


def test_case_32_half_old_half_new() -> None:
    torch.manual_seed(0)
    model = Varied()
    ema = ModelEma(model, decay=0.5)
    old = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.norm(torch.randn(4, 3))
    model.mask.logical_not_()
    ema.update(model)
    new = model.state_dict()
    for name, value in ema.module.state_dict().items():
        if name in ("index", "mask", "norm.num_batches_tracked"):
            assert torch.equal(value, new[name]), "there is no average of these"
        elif name != "_extra_state":
            assert torch.equal(value, 0.5 * old[name] + 0.5 * new[name]), name
            assert not torch.equal(value, new[name]) or name == "norm.bias"
    assert ema.module.head.weight is ema.module.embed.weight


def test_the_average_is_a_copy_that_evaluates() -> None:
    model = Varied().train()
    ema = ModelEma(model)
    assert ema.decay == 0.9999
    assert not any(module.training for module in ema.module.modules()) and model.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    before = ema.module.embed.weight.clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(ema.module.embed.weight, before)
    ema.set(model)
    assert torch.equal(ema.module.embed.weight, model.embed.weight)


def test_the_average_by_another_formula() -> None:
    class Largest(ModelEma):
        def update_fn(self, ema: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            return torch.maximum(ema, new)

    model = nn.Linear(1, 1, bias=False)
    ema = Largest(model)
    for value, largest in ((5.0, 5.0), (3.0, 5.0), (7.0, 7.0)):
        nn.init.constant_(model.weight, value)
        ema.update(model)
        assert ema.module.weight.item() == largest


def test_the_average_is_saved_and_loaded() -> None:
    model = Varied()
    ema, again = ModelEma(model, 0.5), ModelEma(Varied(), 0.5)
    again.load_state_dict(ema.state_dict())
    assert torch.equal(again.module.embed.weight, ema.module.embed.weight)


# Functions of one rank


def test_one_process_sees_nothing_of_the_decorators() -> None:
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    for decorate in (local_process_zero_only, world_process_zero_only, local_process_zero_first):
        decorated = decorate(add)
        assert decorated(1, b=2) == 3 and decorated.__name__ == "add" and decorated.__doc__ == "Add two numbers."
        with pytest.raises(ZeroDivisionError):
            decorate(lambda: 1 // 0)()


def test_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, local, wanted in (("0", "0", (1, 1)), ("1", "1", (None, None)), ("2", "0", (1, None))):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert (local_process_zero_only(lambda: 1)(), world_process_zero_only(lambda: 1)()) == wanted
        with pytest.raises(RuntimeError, match="without a process group: call it after the Trainer is made"):
            local_process_zero_first(lambda: 1)()


RANKS = """
import json, os, sys, time
import torch
from det_core.accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only

nodes = int(sys.argv[1])
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
os.environ["LOCAL_RANK"] = str(rank % (size // nodes))
said = {}

@local_process_zero_only
def local(): return rank
said["local"] = local()

@world_process_zero_only
def world(): time.sleep(0.1); open(sys.argv[2], "w").write("done"); return rank
said["world"] = world()
said["waited"] = open(sys.argv[2]).read()

order = sys.argv[2] + ".order"
@local_process_zero_first
def first():
    if os.environ["LOCAL_RANK"] == "0":
        time.sleep(0.1)
    with open(order, "a") as file: file.write(f"{rank} ")
    return rank * 10
said["first"] = first()
torch.distributed.barrier()
said["order"] = open(order).read().split()

class Odd(Exception):
    def __init__(self, a, b): super().__init__(f"{a}{b}")

for name, decorate, error in (
    ("only", local_process_zero_only, ValueError("gone")), ("zero", world_process_zero_only, SystemExit(3)),
    ("first_fails", local_process_zero_first, FileNotFoundError(2, "no such", "x")),
    ("odd", world_process_zero_only, Odd("no", "pickle")),
):
    @decorate
    def fails(): raise error
    try:
        fails()
    except BaseException as caught:
        said[name] = [type(caught).__name__, str(caught)]
said["after"] = world()
print("SAID " + json.dumps(said), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_wait_and_errors_reach_all(tmp_path: Path, nodes: int) -> None:
    size = 2 * nodes
    env = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with running(RANKS, size, tmp_path, env=env, args=(str(nodes), str(tmp_path / "file"))) as ranks:
        found = ranks.wait()
        assert found == [0] * size, "\n".join(ranks.output(rank) for rank in range(size))
        lines = [next(n for n in ranks.output(rank).splitlines() if n.startswith("SAID ")) for rank in range(size)]
    for rank, said in enumerate(json.loads(line[5:]) for line in lines):
        assert said["local"] == (rank if rank % 2 == 0 else None)
        assert said["world"] == said["after"] == (0 if rank == 0 else None)
        assert said["waited"] == "done" and said["first"] == rank * 10
        zeros = {str(r) for r in range(0, size, 2)}
        assert set(said["order"][:nodes]) == zeros and len(said["order"]) == size
        here, told = rank % 2 == 0, "fails() failed on another rank: "
        assert said["only"] == (["ValueError", "gone"] if here else ["RuntimeError", f"{told}ValueError: gone"])
        assert said["zero"] == (["SystemExit", "3"] if rank == 0 else ["RuntimeError", f"{told}SystemExit: 3"])
        missing = "[Errno 2] no such: 'x'"
        expected = ["FileNotFoundError", missing] if here else ["RuntimeError", f"{told}FileNotFoundError: {missing}"]
        assert said["first_fails"] == expected
        assert said["odd"] == (["Odd", "nopickle"] if rank == 0 else ["RuntimeError", f"{told}Odd: nopickle"])


# Workers, padding


class Draws(Dataset):  # type: ignore[misc]
    """Dataset of the numbers that each generator draws for an item."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()], dtype=torch.float64)


def drawn(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(Draws(), batch_size=1, num_workers=2, worker_init_fn=worker_init_fn, generator=generator)
    return torch.cat(list(loader))


def test_workers_draw_the_same_when_seeded_alike() -> None:
    np.random.seed(0)
    random.seed(0)
    first = drawn(1)
    np.random.rand()
    random.random()
    assert torch.equal(drawn(1), first), "all three generators follow the loader's seed"
    assert not (drawn(2) == first).any(), "and another seed gives others"
    assert len({tuple(row) for row in first.tolist()}) == 4, "each worker draws others"


def test_the_seed_of_torch_becomes_that_of_the_others() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        torch.rand(3)
        worker_init_fn(0)
        found.append((torch.rand(1).item(), np.random.rand(), random.random()))
        worker_init_fn(0)
        assert (torch.rand(1).item(), np.random.rand(), random.random()) == found[0]
    assert found[0] == found[1]


def test_padding_is_removed() -> None:
    pad = -100
    ragged = torch.tensor([[1, pad], [pad, pad], [2, 3], [pad, pad]])
    assert remove_padding(ragged, pad).tolist() == [[1, pad], [2, 3]]
    assert remove_padding(torch.tensor([1.0, pad, 2.0]), pad).tolist() == [1.0, 2.0]
    assert remove_padding(torch.full((2, 3, 4), 0.0), 0.0).shape == (0, 3, 4)
    assert remove_padding(torch.zeros(0, 3), 0.0).shape == (0, 3)
    nan = float("nan")
    assert remove_padding(torch.tensor([[1.0, nan], [nan, nan]]), nan).shape == (1, 2)


def test_a_dataset_of_tensors_in_a_slice() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4)
    assert [len(batch[0]) for batch in DataLoaderSlice(loader, 5)] == [4, 2]
