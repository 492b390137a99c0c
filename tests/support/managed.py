"""Trials of a foreign master: the environment of their processes, and what they have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from det_core import core
from support.foreign_master import ForeignMaster, Trial
from support.ranks import Ranks, running

BEGIN = """
import json, sys, time
from det_core import core, InvalidHP
distributed = core.DistributedContext.detect()
"""
TRAIN = (
    BEGIN
    + """
with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    rank, step = ctx.distributed.rank, 0
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            if rank == 0:
                ctx.train.report_training_metrics(step, {"loss": 1 / step})
                op.report_progress(step)
            ctx.train.report_metrics(f"rank{rank}", step, {"seen": step})
            if step % 5 == 0:
                if rank == 0:
                    ctx.train.report_validation_metrics(step, {"loss": 1 / step})
                with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, storage_id):
                    (path / f"model-{rank}").write_text(str(step))
        if rank == 0:
            op.report_completed(1 / step)
print("the end", flush=True)
"""
)


def variables(
    master: ForeignMaster, trial: Trial, folder: Path, *, url: str | None = None, latest: str | None = None
) -> dict[str, str]:
    """Start an allocation; the variables of its processes. ``url``: the way to the master, if not straight."""
    trial.config.setdefault("checkpoint_storage", {"type": "directory", "container_path": str(folder.parent / "store")})
    found = master.start(trial, folder, latest=latest)
    if url is not None:
        path = folder / "cluster.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "master_url": url}))
    return found | {"DET_CORE_MASTER_TIMEOUT": "30", "DET_CORE_SHIP_TIMEOUT": "30"}


@contextmanager
def processes(
    master: ForeignMaster,
    trial: Trial,
    folder: Path,
    code: str = TRAIN,
    size: int = 1,
    *,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Start an allocation of ``size`` ranks that run ``code``."""
    given = variables(master, trial, folder / f"info-{trial.run_id}", url=url) | dict(env or {})
    with running(code, size, folder, env=given) as ranks:
        yield ranks


@contextmanager
def opened(
    master: ForeignMaster,
    trial: Trial,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    url: str | None = None,
    latest: str | None = None,
    env: Mapping[str, str] | None = None,
    **arguments: object,
) -> Iterator[core.Context]:
    """Open a context of one rank in this process."""
    given = variables(master, trial, folder / f"info-{trial.run_id}", url=url, latest=latest) | dict(env or {})
    for name, value in given.items():
        patch.setenv(name, value)
    arguments.setdefault("tensorboard_mode", core.TensorboardMode.MANUAL)
    try:
        with core.init(**arguments) as ctx:  # type: ignore[arg-type]
            yield ctx
    finally:
        for name in given:
            patch.delenv(name)
