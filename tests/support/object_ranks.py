"""``python -m support.object_ranks STORAGE FOLDER FILES MEGABYTES``, on each rank: every method of ``ctx.checkpoint``.

``STORAGE`` is a ``checkpoint_storage`` in JSON. Each rank brings ``FILES`` small files and one of ``MEGABYTES`` MB, and
all of them one more in common. Prints what was checked, a word a line, then ``done``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from det_core import core
from det_core.core._checkpoint import CheckpointContext
from det_core.storage import open_store
from support.checkpoints import Recorder, tree

NAMES = (".hidden", "a b/ c ", "\u00fcml\u00e4ut/\u4e2d\u6587", "100%/#1?x=y&z+", "..three", "empty")


def files_of(rank: int, count: int, megabytes: int) -> dict[str, bytes]:
    """Return the files that a rank contributes."""
    found = {f"rank {rank}/{name}": f"{rank} {name}".encode() for name in NAMES}
    found |= {f"rank {rank}/small/{i:05}": f"{rank}-{i} ".encode() * 500 for i in range(count)}
    block = bytes(range(256)) * 4096
    found[f"rank {rank}/large"] = b"".join(block[i + rank :] + block[: i + rank] for i in range(megabytes))
    return {**found, f"rank {rank}/empty": b"", "common": b"the same on all"}


class Script:
    """One rank's part."""

    def __init__(self, distributed: core.DistributedContext, storage: str, folder: Path, count: int, size: int) -> None:
        self.distributed = distributed
        self.folder = folder / f"rank-{distributed.rank}"
        self.mine = files_of(distributed.rank, count, size)
        self.all = {p: d for rank in range(distributed.size) for p, d in files_of(rank, count, size).items()}
        self.recorder = Recorder()
        self.store = open_store(json.loads(storage), folder, scratch=folder / "scratch")

    def run(self) -> None:
        context = self.recorder.context(self.distributed, self.folder, store=self.store)
        self.fill(self.folder / "source")
        metadata = {"steps_completed": 3, "by": {str(self.distributed.rank): "x"}}
        uploaded = context.upload(self.folder / "source", metadata, shard=True)
        print("uploaded", flush=True)
        with context.store_path(metadata, shard=True) as (path, stored):
            self.fill(path)
        print("stored", flush=True)
        later = context.upload(self.folder / "source", metadata, shard=True, blocking=False)
        for storage_id in (uploaded, stored):
            self.check(context, storage_id)
        context.close()
        self.clear(uploaded, stored, later)
        self.store.close()
        print("done", flush=True)

    def fill(self, folder: Path) -> None:
        for path, data in self.mine.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def check(self, context: CheckpointContext, storage_id: str) -> None:
        """Check that a restored checkpoint equals the saved files."""
        expected = {str(rank): "x" for rank in range(self.distributed.size)}
        assert context.get_metadata(storage_id) == {"steps_completed": 3, "by": expected}
        target = self.folder.parent / f"target-{storage_id}"
        context.download(storage_id, target)
        self.same(target)
        with context.restore_path(storage_id) as path:
            self.same(path)
        some = self.folder / f"some-{storage_id}"
        context.download(storage_id, some, core.DownloadMode.NoSharedDownload, selector=lambda p: p == "common")
        assert tree(some) == {"common": b"the same on all"}
        print("checked", flush=True)

    def same(self, folder: Path) -> None:
        found = tree(folder)
        found.pop("metadata.json")
        assert found.keys() == self.all.keys(), found.keys() ^ self.all.keys()
        wrong = [path for path, data in found.items() if data != self.all[path]]
        assert not wrong, wrong

    def clear(self, *storage_ids: str) -> None:
        """Check that all three are listed, with the bytes of all ranks, until they are deleted."""
        if self.distributed.rank == 0:
            registered = [record["storage_id"] for record in self.recorder.registered]
            assert sorted(registered) == sorted(storage_ids) == sorted(h.storage_id for h in self.store.list())
            resources = self.recorder.registered[-1]["resources"]
            assert {p for p in resources if not p.endswith("/")} == {*self.all, "metadata.json"}
            for storage_id in storage_ids:
                assert self.store.delete(storage_id) == {}
            assert self.store.list() == []


def main() -> None:
    storage, folder, count, size = sys.argv[1:]
    with core.DistributedContext.from_torch_distributed() as distributed:
        Script(distributed, storage, Path(folder), int(count), int(size)).run()


if __name__ == "__main__":
    main()
