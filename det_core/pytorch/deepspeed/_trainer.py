"""Trainer for DeepSpeed, and the steps of its trials: micro batches, ranks that read data, ranks that report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core import pytorch
from det_core._training.data_order import Position
from det_core.errors import InvalidExperimentException
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import CheckpointContent
from det_core.pytorch._loaders import Loaders
from det_core.pytorch._steps import TrialSteps, as_dictionary, as_metrics
from det_core.pytorch.deepspeed._checkpoint import Shards
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial

logger = logging.getLogger("det_core.pytorch")


class Trainer(pytorch.Trainer):
    """Trainer of a :class:`DeepSpeedTrial`, with the ``fit()`` of ``det_core.pytorch.Trainer``.

    Args:
        trial: an instance of your class, built with ``context``.
        context: the context from ``init()``.
    """

    _kind = DeepSpeedTrial

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        super().__init__(trial, context)  # type: ignore[arg-type]

    def _steps(self, hooks: Hooks) -> TrialSteps:
        return DeepSpeedTrialSteps(self._trial, self._context, hooks)

    def _check_trial(self) -> None:
        if not self._context.models:
            raise InvalidExperimentException(
                f"{type(self._trial).__name__}.__init__() wraps no engine: "
                "self.engine = context.wrap_model_engine(deepspeed.initialize(…)[0])"
            )
        self._check_evaluation()


class DeepSpeedTrialSteps(TrialSteps):
    """Steps of a :class:`DeepSpeedTrial`."""

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, hooks: Hooks) -> None:
        self._context = context
        self._mpu = context._mpu
        self._reports = context._mpu.should_report_metrics
        self._micro_batches = context.get_num_micro_batches_per_slot()
        self._pipeline = context.use_pipeline_parallel
        loaders = Loaders(
            trial, context, rank=self._mpu.data_parallel_rank, size=self._mpu.data_parallel_world_size,
            each=self._micro_batches,
        )  # fmt: skip
        super().__init__(trial, context, loaders)
        self._shards = Shards(trial, context, hooks)
        self._evaluations = 0
        self._is_first = True
        self._add = self.buffer.add
        self._train_batch = trial.train_batch
        self._engine = context.models[0]
        if context._auto_accumulation and not self._pipeline:
            self.rows_per_batch = self._micro_batches
        self.saves_alone = self._distributed.size == 1

    # Data.

    def read(self, folder: Path, storage_id: str) -> CheckpointContent:
        """Read this rank's file, and the chief's counters."""
        return self._shards.read(folder, storage_id)

    def loaders(self, position: Position, _state: Mapping[str, Any] | None) -> tuple[Iterator[Any] | None, int | None]:
        """Build loaders on the ranks that read data; the rank with the fewest micro batches sets the epoch length."""
        builds = self._mpu.should_build_data_loader
        batches = None
        own = None
        if builds:
            batches, length = self._loaders.build(position, full_validation=self._evaluates_full)
            evaluations = None
            if not self._evaluates_full:
                evaluations = self._loaders.validation()[1]
            own = (length, evaluations, self._loaders.distribution)
        per_rank = self._distributed.allgather((own, self._reports))
        built = {rank: loaders for rank, (loaders, _) in enumerate(per_rank) if loaders is not None}
        if not built:
            raise InvalidExperimentException(
                "no rank builds data loaders: some ModelParallelUnit must have should_build_data_loader"
            )
        if not any(reports for _, reports in per_rank):
            raise InvalidExperimentException(
                "no rank reports metrics: some ModelParallelUnit must have should_report_metrics"
            )
        lengths, evaluation_lengths, distributions = zip(*built.values(), strict=True)
        passes = {rank: loaders[2].pass_batches for rank, loaders in built.items() if loaders[2] is not None}
        if len(set(passes.values())) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in passes.items())
            raise InvalidExperimentException(
                f"length of the training set differs between ranks: micro batches in a pass of all ranks are {counts}"
            )
        self._loaders.distribution = distributions[0]  # on the chief too, which may build none
        if not self._evaluates_full:
            self._evaluations = self._rounds(evaluation_lengths)
        return batches, self._epoch_len(lengths)

    def _epoch_len(self, lengths: Sequence[int | None]) -> int | None:
        """Return the number of batches in an epoch for these numbers of micro batches."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        if len(set(known)) > 1 and self._distributed.rank == 0:
            logger.warning(
                "ranks have from %d to %d micro batches in a pass: using the smallest number for the epoch",
                min(known), max(known),
            )  # fmt: skip
        if min(known) < self._micro_batches:
            raise InvalidExperimentException(
                f"the training loader has {min(known)} micro batch(es) for a rank in a pass, fewer than the "
                f"{self._micro_batches} of one batch (gradient_accumulation_steps)"
            )
        return min(known) // self._micro_batches

    def _rounds(self, lengths: Sequence[int | None]) -> int:
        """Return the number of evaluations, equal on all ranks."""
        # ZeRO and pipelines communicate in the forward pass, so an extra call on one rank would hang.
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            raise InvalidExperimentException("the validation loader needs a length: ranks must evaluate equally often")
        each = 1
        if self._pipeline:
            each = self._micro_batches
        rounds, rest = divmod(min(known), each)
        if not rounds:
            raise InvalidExperimentException(
                f"the validation loader has {min(known)} batch(es) for a rank, which needs at least {each} to evaluate "
                "once"
            )
        if rest and self._distributed.rank == 0:
            logger.warning(
                "skipping the last %d of %d validation batches: a pipeline takes %d at once", rest, min(known), each
            )
        return rounds

    # Training.

    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Call ``train_batch`` for each micro batch; a pipeline takes all of them in one call."""
        context = self._context
        context._batch = batch_idx
        context._epoch = epoch_idx
        before = None
        if self._is_first:
            before = self._steps_taken()
        for _ in range(self.rows_per_batch):
            metrics = self._train_batch(batches, epoch_idx, batch_idx)
            if self._reports:
                if type(metrics) is not dict:
                    metrics = self._checked(as_metrics, metrics, batch_idx)
                self._add(metrics)
        if before is not None and self._steps_taken() == before:
            raise AssertionError(
                f"no engine took a step in batch {batch_idx}: train_batch() must call engine.backward(loss) "
                "and engine.step(), or a pipeline's engine.train_batch()"
            )
        self._is_first = False
        if not self._pipeline and self._engine.micro_steps % self._micro_batches:
            raise AssertionError(
                f"the first engine took {self._engine.micro_steps} micro steps up to batch {batch_idx}, which is not a "
                f"multiple of its gradient_accumulation_steps={self._micro_batches}: train_batch() must call "
                "engine.step() once for each micro batch, and all of them after disable_auto_grad_accumulation()"
            )

    def _steps_taken(self) -> list[int]:
        return [engine.micro_steps + engine.global_steps for engine in self._context.models]

    def _checked(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return the metrics that ``check`` accepts; otherwise raise its error, with advice about this rank."""
        try:
            return check(*arguments)
        except TypeError as e:
            message = str(e)
            if self._context._mpu_given or self._pipeline:
                message += (
                    f"; if rank {self._distributed.rank} should not report metrics, call context.set_mpu() there with "
                    "a ModelParallelUnit that has should_report_metrics=False"
                )
            raise InvalidExperimentException(message) from None

    # Validation.

    def validation(self) -> Iterator[Any]:
        """Yield the iterator of a new pass, or None on a rank without data, once for each evaluation."""
        self._forget_shapes()
        batches = None
        if self._mpu.should_build_data_loader:
            batches = self._loaders.validation()[0]
        for _ in range(self._evaluations):
            yield batches
        self._forget_shapes()

    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any] | None:
        """Call ``evaluate_batch``, with ``batch_idx`` if it has that parameter."""
        arguments = [batch]
        if self._with_batch_idx:
            arguments.append(batch_idx)
        try:
            metrics = self._trial.evaluate_batch(*arguments)
        except StopIteration as e:
            raise InvalidExperimentException(
                f"evaluate_batch() ran out of data at batch {batch_idx} of {self._evaluations} on rank "
                f"{self._distributed.rank}: the validation loader ended before its length, or next() was called twice"
            ) from e
        if not self._reports:
            return None
        checked: Mapping[str, Any] = self._checked(as_dictionary, metrics, "evaluate_batch", batch_idx)
        return checked

    def _forget_shapes(self) -> None:
        """Let stages of a pipeline exchange batches of another size next."""
        for engine in self._context.models:
            if (forget := getattr(engine, "reset_activation_shape", None)) is not None:
                forget()

    # Checkpoints.

    def apply(self, content: CheckpointContent) -> None:
        """Restore engines, then callbacks."""
        self._shards.apply(content)

    def save(self, content: CheckpointContent, *, alone: bool = False) -> str:
        """Save this rank's part."""
        return self._shards.save(content)
