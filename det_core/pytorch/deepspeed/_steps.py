"""How a DeepSpeedTrial is called: micro batches, ranks that read data, ranks that report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from det_core._training.data_order import Position
from det_core.errors import InvalidExperimentException
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import Content
from det_core.pytorch._loaders import Dealing, Loaders
from det_core.pytorch._steps import TrialSteps, as_dictionary, as_metrics
from det_core.pytorch.deepspeed._checkpoint import Shards
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial

logger = logging.getLogger("det_core.pytorch")


class DeepSpeedTrialSteps(TrialSteps):
    """How a :class:`DeepSpeedTrial` is called and saved.

    Args:
        trial: the user's.
        context: the one that it was built with.
        hooks: its callbacks.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, hooks: Hooks) -> None:
        self._context = context
        self._mpu, self._reports = context._mpu, context._mpu.should_report_metrics
        self._micro_batches = context.get_num_micro_batches_per_slot()
        self._pipeline = context.use_pipeline_parallel
        loaders = Loaders(
            trial, context, rank=self._mpu.data_parallel_rank, size=self._mpu.data_parallel_world_size,
            each=self._micro_batches,
        )  # fmt: skip
        super().__init__(trial, context, loaders)
        self._shards = Shards(trial, context, hooks)
        self._evaluations = 0
        self._add, self._train_batch, self._engine = self.buffer.add, trial.train_batch, context.models[0]
        self.rows_per_batch = 1 if self._pipeline or not context._auto_accumulation else self._micro_batches
        self.saves_alone = self._distributed.size == 1

    # data

    def read(self, folder: Path, storage_id: str) -> Content:
        """Every rank reads its own file, and the chief's counters."""
        return self._shards.read(folder, storage_id)

    def loaders(self, position: Position) -> tuple[Iterator[Any] | None, int | None]:
        """Build loaders where they are wanted; all ranks have the epochs of the one with the fewest micro batches."""
        builds, batches, length, evaluations = self._mpu.should_build_data_loader, None, None, None
        if builds:
            batches, length = self._loaders.build(position, full_validation=self._evaluates_full)
            evaluations = None if self._evaluates_full else self._loaders.validation()[1]
        mine = (length, evaluations, self._loaders.dealing) if builds else None
        built = [each for each in self._distributed.allgather(mine) if each is not None]
        if not built:
            raise InvalidExperimentException(
                "no rank builds data loaders: a ModelParallelUnit needs should_build_data_loader on some"
            )
        dealing: Dealing | None = built[0][2]
        self._loaders.dealing = dealing
        if not self._evaluates_full:
            self._evaluations = self._rounds([each[1] for each in built])
        return batches, self._epoch_len([each[0] for each in built])

    def _epoch_len(self, lengths: list[int | None]) -> int | None:
        """Batches in an epoch, from how many micro batches each loader has."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        if len(set(known)) > 1 and self._distributed.rank == 0:
            logger.warning(
                "ranks have from %d to %d micro batches in a pass: an epoch has as many as the fewest",
                min(known), max(known),
            )  # fmt: skip
        if min(known) < self._micro_batches:
            raise InvalidExperimentException(
                f"the training loader gives a rank {min(known)} micro batch(es) in a pass, fewer than the "
                f"{self._micro_batches} of one batch (gradient_accumulation_steps)"
            )
        return min(known) // self._micro_batches

    def _rounds(self, lengths: list[int | None]) -> int:
        """How often each rank evaluates: all equally often, since engines may exchange parameters meanwhile."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            raise InvalidExperimentException("the validation loader needs a length: ranks must evaluate equally often")
        each = self._micro_batches if self._pipeline else 1
        rounds, rest = divmod(min(known), each)
        if not rounds:
            raise InvalidExperimentException(
                f"the validation loader gives a rank {min(known)} batch(es), and each rank needs at least {each} to "
                "evaluate once"
            )
        if rest and self._distributed.rank == 0:
            logger.warning(
                "the last %d of %d validation batches are left out: a pipeline takes %d at once", rest, min(known), each
            )
        return rounds

    # training

    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Call ``train_batch`` for each micro batch; a pipeline takes all of them at once."""
        context = self._context
        context._batch, context._epoch = batch_idx, epoch_idx
        for _ in range(self.rows_per_batch):
            metrics = self._train_batch(batches, epoch_idx, batch_idx)
            if self._reports:
                self._add(metrics if type(metrics) is dict else self._as_metrics(metrics, batch_idx))
        if not self._pipeline and self._engine.micro_steps % self._micro_batches:
            raise AssertionError(
                f"after batch {batch_idx} the first engine has taken {self._engine.micro_steps} micro steps, which is "
                f"no multiple of its gradient_accumulation_steps={self._micro_batches}: train_batch() must call "
                "engine.step() once for each micro batch, and all of them after disable_auto_grad_accumulation()"
            )

    def _as_metrics(self, metrics: Any, batch_idx: int) -> dict[str, Any]:
        try:
            return as_metrics(metrics, batch_idx)
        except TypeError as e:
            raise self._unreportable(e) from None

    def _unreportable(self, error: TypeError) -> InvalidExperimentException:
        """Rank and way out, for a rank that reports something else than metrics."""
        hint = "" if self._mpu.should_build_data_loader else ", and reads no data"
        return InvalidExperimentException(
            f"{error}; rank {self._distributed.rank} reports metrics{hint}: if it is not to, give context.set_mpu() a "
            "ModelParallelUnit with should_report_metrics=False there"
        )

    # validation

    def validation(self) -> Iterator[Any]:
        """The iterator of a new pass over this rank's share, where it reads data, as often as each rank evaluates."""
        self._forget_shapes()
        batches = self._loaders.validation()[0] if self._mpu.should_build_data_loader else None
        for _ in range(self._evaluations):
            yield batches
        self._forget_shapes()

    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any] | None:
        """Call ``evaluate_batch``, with ``batch_idx`` if it takes that."""
        arguments = (batch, batch_idx) if self._with_batch_idx else (batch,)
        metrics = self._trial.evaluate_batch(*arguments)
        if not self._reports:
            return None
        try:
            return as_dictionary(metrics, "evaluate_batch", batch_idx)
        except TypeError as e:
            raise self._unreportable(e) from None

    def _forget_shapes(self) -> None:
        """Between training and validation, since a pipeline's stages expect batches of one size from each other."""
        for engine in self._context.models:
            if (forget := getattr(engine, "reset_activation_shape", None)) is not None:
                forget()

    # checkpoints

    def apply(self, content: Content) -> None:
        """Engines, then callbacks."""
        self._shards.apply(content)

    def save(self, content: Content, *, alone: bool = False) -> str:
        """Every rank saves its part."""
        return self._shards.save(content)
