"""``python -m support.dying_objects OPERATION HOW FOLDER [S3]``: die at each call to an object store that is made.

``S3``: the ``checkpoint_storage`` of the store, as JSON, without its prefix. Left out: a folder by fsspec.

A fork per call: the parent has no threads, and starts no interpreter anew.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from det_core.storage import open_store
from det_core.storage._object_store import ObjectStore
from support.buckets import FaultyDriver, object_store
from support.checkpoints import FILES, STEPS, Recorder, alone, fill

DEAD = 77


def store_of(work: Path, s3: str | None) -> ObjectStore:
    """Return the store of a directory."""
    if s3 is None:
        return object_store(f"local://{work}/store", work / "scratch")
    found = open_store({**json.loads(s3), "prefix": work.name}, work, scratch=work / "scratch")
    assert isinstance(found, ObjectStore)
    return found


def prepare(work: Path, s3: str | None) -> None:
    """Create a complete checkpoint, and a directory to upload."""
    store = store_of(work, s3)
    with alone() as distributed:
        context = Recorder().context(distributed, work, store=store)
        (work / "old").write_text(context.upload(work / "source", STEPS))


def operate(name: str, how: str, at: int, work: Path, s3: str | None) -> None:
    store = ObjectStore(FaultyDriver(store_of(work, s3).driver, at, how), work / "scratch")
    with alone() as distributed:
        context = Recorder().context(distributed, work, store=store)
        if name == "upload":
            context.upload(work / "source", STEPS)
        elif name == "delete":
            context.delete((work / "old").read_text())
        else:
            with context.store_path(STEPS) as (path, _):
                fill(path)


def in_child(work: Callable[[], None]) -> int:
    """Return the exit status of a process that runs ``work``; 0 if it completed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def read_ahead() -> None:
    """Import and read, once, what every child needs to reach S3."""
    import s3fs  # noqa: F401
    from aiobotocore.session import AioSession

    loader = AioSession().get_component("data_loader")
    for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
        loader.load_data(name)
    for kind in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", kind)
    assert threading.active_count() == 1


def main(name: str, how: str, folder: Path, s3: str | None = None) -> None:
    if s3 is not None:
        read_ahead()
    for at in range(1, 1000):
        work = folder / f"death-{at}"
        fill(work / "source", FILES)
        assert in_child(lambda work=work: prepare(work, s3)) == 0  # type: ignore[misc]
        status = in_child(lambda at=at, work=work: operate(name, how, at, work, s3))  # type: ignore[misc]
        if status == 0:
            return
        assert status == DEAD, f"call {at}: exit {status}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
