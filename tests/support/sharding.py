"""``python -m support.sharding WHAT STORE [MORE]``, on each rank: save or restore a model that FSDP shards.

``save WAY``: train a little, save by ``store_path``, ``begin`` or ``async``, and print the storage_id and a digest of
what was saved. ``restore ID CACHE``: restore into a model that differs, from a directory and from a store that is none,
and print the digest of each. ``fail``: one rank cannot write.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from det_core import core
from det_core._errors import CheckpointError
from det_core.core._checkpoint import CheckpointCache, CheckpointContext
from support.checkpoints import Recorder
from support.elsewhere import Elsewhere

STEPS = {"steps_completed": 3}


class Training:
    """A model whose parts do not divide by the number of ranks, and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 3))
        for part in (self.model[0], self.model[2], self.model):
            fully_shard(part)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "extra": {"rng": torch.get_rng_state()}}


def digest(state: Any) -> str:
    """One digest for the whole of the state, which is the same however it is sharded."""
    found = hashlib.sha256()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(value[key], f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                walk(item, f"{path}/{i}")
        else:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            data = whole.numpy().tobytes() if isinstance(whole, torch.Tensor) else repr(whole).encode()
            found.update(path.encode() + data)

    walk(state, "")
    return found.hexdigest()


def save(context: CheckpointContext, way: str) -> None:
    training = Training(seed=0)
    training.step()
    if way == "async":
        return save_while_training(context, training)
    before = digest(training.state())
    if way == "store_path":
        with context.store_path(STEPS, shard=True) as (path, storage_id):
            dcp.save(training.state(), checkpoint_id=path)
    else:
        handle = context.begin(STEPS, shard=True)
        dcp.save(training.state(), checkpoint_id=handle.path)
        handle.commit()
        storage_id = handle.storage_id
    print("saved", storage_id, before, flush=True)


def ending(handle: core.CheckpointHandle) -> Callable[[Any], None]:
    """What ends a checkpoint when the future of its writer is done, in the writer's thread."""

    def end(written: Any) -> None:
        if written.exception():
            handle.abort(written.exception(), blocking=False)
        else:
            handle.commit(blocking=False)

    return end


def save_while_training(context: CheckpointContext, training: Training) -> None:
    """Two checkpoints; each is what there was when it was begun, as the training goes on meanwhile."""
    writers = dist.new_group(backend="gloo")
    handles = []
    for _ in range(2):
        handle = context.begin(STEPS, shard=True)
        before = digest(training.state())
        future = dcp.async_save(training.state(), checkpoint_id=handle.path, process_group=writers)
        future.add_done_callback(ending(handle))  # type: ignore[union-attr]
        for _ in range(20):
            training.step()
        assert digest(training.state()) != before
        handles.append(handle)
        future.result()  # type: ignore[union-attr]
        print("saved", handle.storage_id, before, flush=True)
    for handle in handles:
        assert handle.wait(60)


def restore(context: CheckpointContext, storage_id: str, store: Path, cache: Path) -> None:
    elsewhere = Elsewhere(store)
    other = Recorder().context(context._distributed, store, store=elsewhere, cache=CheckpointCache(cache, 1 << 30))
    for seed, reader in ((1, context), (2, other)):
        state = Training(seed).state()
        with reader.restore_path(storage_id) as path:
            dcp.load(state, checkpoint_id=path)
        print("restored", digest(state), flush=True)
    other.close()
    print("fetched", sum(size for _, size in elsewhere.fetched), flush=True)


def fail(context: CheckpointContext) -> None:
    """The writer of the last rank fails; every rank is told, and nothing is kept."""
    training = Training(seed=0)
    handle = context.begin(STEPS, shard=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        (handle.path / "__1_0.distcp").mkdir()
    future = dcp.async_save(training.state(), checkpoint_id=handle.path, process_group=dist.new_group(backend="gloo"))
    future.add_done_callback(ending(handle))  # type: ignore[union-attr]
    try:
        handle.wait(60)
    except CheckpointError as e:
        print("told", str(e).splitlines()[0], flush=True)


def main(what: str, store: str, *more: str) -> None:
    dist.init_process_group("gloo")
    with core.DistributedContext.from_torch_distributed() as distributed:
        context = Recorder().context(distributed, Path(store))
        if what == "save":
            save(context, *more)
        elif what == "restore":
            restore(context, more[0], Path(store), Path(more[1]))
        else:
            fail(context)
        context.close()
        distributed.allgather(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
