"""The Trainer for DeepSpeed, and how it calls a trial: micro batches, ranks that read data, ranks that report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
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
    """Trains a :class:`DeepSpeedTrial`; ``fit()`` is that of ``det_core.pytorch.Trainer``.

    Args:
        trial: an instance of the user's class, built with ``context``.
        context: what ``init()`` gave.
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
    """How a :class:`DeepSpeedTrial` is called and saved."""

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
        self._add, self._train_batch, self._engine = self.buffer.add, trial.train_batch, context.models[0]
        self.rows_per_batch = 1 if self._pipeline or not context._auto_accumulation else self._micro_batches
        self.saves_alone = self._distributed.size == 1

    # data

    def read(self, folder: Path, storage_id: str) -> CheckpointContent:
        """Every rank reads its own file, and the chief's counters."""
        return self._shards.read(folder, storage_id)

    def loaders(self, position: Position, _state: Mapping[str, Any] | None) -> tuple[Iterator[Any] | None, int | None]:
        """Build loaders where they are wanted; all ranks have the epochs of the one with the fewest micro batches."""
        builds = self._mpu.should_build_data_loader
        batches = None
        length = None
        evaluations = None
        if builds:
            batches, length = self._loaders.build(position, full_validation=self._evaluates_full)
            evaluations = None if self._evaluates_full else self._loaders.validation()[1]
        mine = (length, evaluations, self._loaders.distribution) if builds else None
        everybody = self._distributed.allgather((mine, self._reports))
        built = [each for each, _ in everybody if each is not None]
        if not built or not any(reports for _, reports in everybody):
            raise InvalidExperimentException(
                f"no rank {'reports metrics' if built else 'builds data loaders'}: a ModelParallelUnit needs "
                f"should_{'report_metrics' if built else 'build_data_loader'} on some"
            )
        dealt = {rank: each[2].pass_batches for rank, (each, _) in enumerate(everybody) if each and each[2]}
        if len(set(dealt.values())) > 1:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in dealt.items())
            raise InvalidExperimentException(
                f"ranks have training sets of different lengths: micro batches in a pass of all are {told}"
            )
        self._loaders.distribution = built[0][2]
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
        context._batch = batch_idx
        context._epoch = epoch_idx
        before = self._steps_taken() if self._is_first else None
        for _ in range(self.rows_per_batch):
            metrics = self._train_batch(batches, epoch_idx, batch_idx)
            if self._reports:
                self._add(metrics if type(metrics) is dict else self._reported(as_metrics, metrics, batch_idx))
        if before is not None and self._steps_taken() == before:
            raise AssertionError(
                f"after batch {batch_idx} no engine has taken a step: train_batch() must call engine.backward(loss) "
                "and engine.step(), or a pipeline's engine.train_batch()"
            )
        self._is_first = False
        if not self._pipeline and self._engine.micro_steps % self._micro_batches:
            raise AssertionError(
                f"after batch {batch_idx} the first engine has taken {self._engine.micro_steps} micro steps, which is "
                f"no multiple of its gradient_accumulation_steps={self._micro_batches}: train_batch() must call "
                "engine.step() once for each micro batch, and all of them after disable_auto_grad_accumulation()"
            )

    def _steps_taken(self) -> list[int]:
        return [engine.micro_steps + engine.global_steps for engine in self._context.models]

    def _reported(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """What ``read`` takes for metrics; else the rank and a way out, where ranks do not all work alike."""
        try:
            return read(*arguments)
        except TypeError as e:
            told = str(e)
            if self._context._mpu_given or self._pipeline:
                hint = "" if self._mpu.should_build_data_loader else ", and reads no data"
                told += (
                    f"; rank {self._distributed.rank} reports metrics{hint}: if it is not to, give context.set_mpu() a "
                    "ModelParallelUnit with should_report_metrics=False there"
                )
            raise InvalidExperimentException(told) from None

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
        try:
            metrics = self._trial.evaluate_batch(*arguments)
        except StopIteration as e:
            raise InvalidExperimentException(
                f"evaluate_batch() ran out of data at batch {batch_idx} of {self._evaluations} on rank "
                f"{self._distributed.rank}: the validation loader ended before its length, or next() was called twice"
            ) from e
        return self._reported(as_dictionary, metrics, "evaluate_batch", batch_idx) if self._reports else None

    def _forget_shapes(self) -> None:
        """Between training and validation, since a pipeline's stages expect batches of one size from each other."""
        for engine in self._context.models:
            if (forget := getattr(engine, "reset_activation_shape", None)) is not None:
                forget()

    # checkpoints

    def apply(self, content: CheckpointContent) -> None:
        """Engines, then callbacks."""
        self._shards.apply(content)

    def save(self, content: CheckpointContent, *, alone: bool = False) -> str:
        """Every rank saves its part."""
        return self._shards.save(content)
