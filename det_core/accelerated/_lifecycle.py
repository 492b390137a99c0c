"""Start and end of a run: its context and ranks, and the state in which the Trainer is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from det_core._training.data_order import length_of
from det_core.accelerated._base import Run, TrainerBase, as_list, in_container_of
from det_core.accelerated._data import whole_length
from det_core.accelerated._managed import CoreBridge, Ranks, open_context
from det_core.accelerated._strategy import Strategy


@contextmanager
def open_run(trainer: TrainerBase) -> Iterator[None]:
    """Prepare a run, and restore the Trainer after it; send an error to ranks that wait. Nested uses do nothing."""
    session = trainer._det_core
    if session.is_open:
        yield
        return
    session.is_open = True
    try:
        connect(trainer)
        yield
    except RuntimeError:
        if session.has_peers and session.ranks is not None:  # torch reports only a closed connection
            session.ranks.distributed.raise_if_peer_failed()
        raise
    finally:
        run = session.run
        session.is_open = False
        if run.is_begun:
            run.is_begun = False
            if session.managed is not None:
                session.managed.close(trainer)
        restore_parts(trainer)
        if isinstance(session.ranks, Ranks):
            session.ranks.distributed.close(failure=sys.exc_info()[1])
        session.ranks = None


def connect(trainer: TrainerBase) -> None:
    """Look up the current accelerator, core context and ranks.

    Raises:
        ValueError: If the context has another number of ranks.
    """
    session = trainer._det_core
    if session.strategy.accelerator is not trainer._accelerator:
        session.strategy = Strategy(trainer._accelerator)
    size = session.strategy.num_processes
    context = open_context(session.given_context)
    if context is not None and context.distributed.size != size:
        remedy = "give core.init(distributed=core.DistributedContext.detect())"
        if size == 1:
            remedy = (
                "accelerate finds ranks of torch's launchers, and on CPUs an Accelerator of your own needs cpu=True"
            )
        raise ValueError(
            f"the core context has {context.distributed.size} rank(s), and the model is trained by {size}: {remedy}"
        )
    session.has_peers = size > 1
    session.managed = None
    if context is not None:
        session.managed = CoreBridge.of(context)
        session.ranks = context
    elif session.ranks is None and size > 1:
        session.ranks = Ranks()


def begin_run(trainer: TrainerBase, run: Run, resume_from: Any = None) -> bool:
    """Begin a run, or resume it from a checkpoint; return whether there is something left to train."""
    session = trainer._det_core
    if not session.is_loaded:
        session.resumed = None
    session.run = run
    session.preempted = False
    session.is_loaded = False
    session.take_stop()
    compare_ranks(trainer)
    run.is_begun = session.managed is None or session.managed.begin(trainer, resume_from)
    return run.is_begun


def compare_ranks(trainer: TrainerBase) -> None:
    """Compare data and options of the ranks before the first batch, so that none waits forever.

    Raises:
        ValueError: If data or options differ between ranks.
    """
    session = trainer._det_core
    config = trainer.run_config
    if not session.has_peers:
        return
    mine: dict[str, Any] = {}
    for kind in ("train", "eval"):
        loader = getattr(trainer, f"_{kind}_dataloader")
        dataset = getattr(trainer, f"{kind}_dataset")
        lengths: tuple[int | None, int | None] = (None, None)
        if loader is not None:
            lengths = (length_of(dataset), whole_length(loader))
        mine[f"the length of {kind}_dataset"] = lengths[0]
        mine[f"the length of the {kind} loader"] = lengths[1]
    for name in ("num_epochs", "max_num_train_steps", "gradient_accumulation_steps", "gradient_clip_value"):
        mine[name] = getattr(config, name, None)
    for name in ("clip_norm", "evaluate_every", "report_every", "checkpoint_every"):
        mine[name.replace("clip", "gradient_clip")] = getattr(session.run, name)
    everyone = session.strategy.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"the ranks differ in {name}: {everyone[0][name]} on rank 0, {value} on rank {rank}. Give all of "
                    "them the same data and options"
                )


def restore_parts(trainer: TrainerBase) -> None:
    """Restore model and optimizers as the user built them."""
    strategy = trainer._det_core.strategy
    trainer.model = strategy.unwrap_model(trainer.model)
    strategy.release(trainer.model)
    plain = [strategy.unwrap_optimizer(optimizer) for optimizer in as_list(trainer.optimizer)]
    trainer.optimizer = in_container_of(trainer.optimizer, plain)
