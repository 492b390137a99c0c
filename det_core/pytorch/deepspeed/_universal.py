"""Loading a checkpoint on another number of ranks than wrote it, by DeepSpeed's universal checkpoints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from det_core.errors import CheckpointError
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext

logger = logging.getLogger("det_core.pytorch")


@contextmanager
def for_other_ranks(folder: Path, ranks: int, context: DeepSpeedTrialContext) -> Iterator[Path]:
    """A folder from which engines load what another number of ranks has saved; every rank enters.

    Where ZeRO has partitioned the optimizer, DeepSpeed's converter puts the parts together again, once on each machine;
    it knows the states of Adam and its kind. Without ZeRO the files are good for any number of data parallel ranks.

    Args:
        folder: the checkpoint.
        ranks: how many wrote it.
        context: holds the engines.

    Raises:
        CheckpointError: DeepSpeed can do neither, on every rank.
    """
    distributed = context.distributed
    partitioned = sorted({path.parent for path in folder.glob("*/*_optim_states.pt")})
    size = distributed.size
    why = f"a checkpoint of {ranks} rank(s) cannot be loaded on {size}: start as many as then, or from scratch"
    made = None
    if partitioned and distributed.local_rank == 0:
        made = tempfile.mkdtemp(prefix="det_core-universal-")
    try:
        failed = _converted(folder, partitioned, Path(made)) if made is not None else None
        if failures := [each for each in distributed.allgather(failed) if each is not None]:
            raise CheckpointError(f"{why} (DeepSpeed's universal checkpoint, for Adam and its kind: {failures[0]})")
        path = distributed.broadcast_local(made)
        with _loading_universal(context) if partitioned else contextlib.nullcontext():
            try:
                yield folder if path is None else Path(path)
            except CheckpointError:
                raise
            except Exception as e:
                raise CheckpointError(f"{why} (DeepSpeed: {type(e).__name__}: {e})") from e
        distributed.allgather_local(None)  # all have read it
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _converted(folder: Path, partitioned: list[Path], into: Path) -> str | None:
    """Make what is like ``folder``, with universal checkpoints in place of some of its folders; what went wrong."""
    from deepspeed.checkpoint import ds_to_universal

    for path in folder.iterdir():
        if path not in partitioned:
            os.symlink(path.absolute(), into / path.name)
    for path in partitioned:
        logger.info("converting %s for another number of ranks, into %s", path, into)
        (into / path.name).mkdir()
        asked = Namespace(
            input_folder=str(path), output_folder=str(into / path.name), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=False, inject_missing_state=True,
        )  # fmt: skip
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                ds_to_universal.main(asked)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return None


@contextmanager
def _loading_universal(context: DeepSpeedTrialContext) -> Iterator[None]:
    """Have engines read universal checkpoints, as they do where their configuration says so."""
    before = [(engine._config, engine._config.load_universal_checkpoint) for engine in context.models]
    try:
        for config, _ in before:
            config.load_universal_checkpoint = True
        yield
    finally:
        for config, asked in before:
            config.load_universal_checkpoint = asked
