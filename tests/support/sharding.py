"""``python -m support.sharding WHAT STORAGE FOLDER [MORE]``, on each rank: save or restore a model that FSDP shards.

``STORAGE`` is a ``checkpoint_storage`` in JSON, and ``FOLDER`` this machine's. ``save WAY [fail]``: train a little,
save by ``store_path`` or ``async``, and print the storage_id and a digest of what was saved; then, if asked for, one
rank cannot write. ``restore ID``: restore into a model that differs, and print its digest; a directory is also read as
if it were none.
"""

from __future__ import annotations

import hashlib
import json
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
from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointError
from det_core.storage import open_store
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
    """Return one digest for the whole of the state, which is the same however it is sharded."""
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
    with context.store_path(STEPS, shard=True) as (path, storage_id):
        dcp.save(training.state(), checkpoint_id=path)
    print("saved", storage_id, before, flush=True)


def ending(handle: core.CheckpointHandle) -> Callable[[Any], None]:
    """Return a callback that ends a checkpoint when its writer's future is done, in the writer's thread."""

    def end(written: Any) -> None:
        if written.exception():
            handle.abort(written.exception(), blocking=False)
        else:
            handle.commit(blocking=False)

    return end


def save_while_training(context: CheckpointContext, training: Training) -> None:
    """Save two checkpoints; each holds the state at its begin, as the training continues meanwhile."""
    writers = dist.new_group(backend="gloo")
    handles = []
    for _ in range(2):
        handle = context.begin(STEPS, shard=True)  # waits for the one before
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
        assert handle.wait()


def restore(context: CheckpointContext, storage_id: str, seed: int = 1) -> None:
    state = Training(seed).state()
    with context.restore_path(storage_id) as path:
        dcp.load(state, checkpoint_id=path)
    print("restored", digest(state), flush=True)


def restore_from_elsewhere(distributed: core.DistributedContext, storage_id: str, root: Path) -> None:
    elsewhere = Elsewhere(root)
    context = Recorder().context(distributed, root, store=elsewhere)
    restore(context, storage_id, seed=2)
    context.close()
    print("fetched", sum(size for _, size in elsewhere.fetched), flush=True)


def fail(context: CheckpointContext) -> None:
    """Fail in the writer of the last rank; every rank raises the error, and nothing is kept."""
    training = Training(seed=0)
    handle = context.begin(STEPS, shard=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        (handle.path / "__1_0.distcp").mkdir()
    future = dcp.async_save(training.state(), checkpoint_id=handle.path, process_group=dist.new_group(backend="gloo"))
    future.add_done_callback(ending(handle))  # type: ignore[union-attr]
    try:
        handle.wait()
    except CheckpointError as e:
        print("told", str(e).splitlines()[0], flush=True)


def main(what: str, where: str, here: str, *more: str) -> None:
    dist.init_process_group("gloo")
    storage = json.loads(where)
    store = open_store(storage, Path(here), scratch=Path(here) / "scratch")
    with core.DistributedContext.from_torch_distributed() as distributed:
        context = Recorder().context(distributed, Path(here), store=store)
        if what == "save":
            save(context, more[0])
            if "fail" in more:
                fail(context)
        elif what == "restore":
            restore(context, *more)
            if isinstance(storage, str):
                restore_from_elsewhere(distributed, more[0], Path(storage))
        context.close()
        store.close()
        distributed.allgather(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
