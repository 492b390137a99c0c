"""Base class of user-defined trials with DeepSpeed."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from det_core.errors import CheckpointError
from det_core.pytorch._data import DataLoader
from det_core.pytorch._runner import is_broken_collective
from det_core.pytorch._trial import Trial
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext


class DeepSpeedTrial(Trial):
    """A training with DeepSpeed engines. Subclass it, and pass an instance to ``det_core.pytorch.deepspeed.Trainer``.

    In ``__init__``, build engines with ``deepspeed.initialize``, and pass each to ``context.wrap_model_engine`` to save
    and restore it. Engines manage optimizers, schedulers, precision and gradients, so nothing else is wrapped. Override
    either :meth:`evaluate_batch` or :meth:`evaluate_full_dataset`.

    Example:
        ::

            class MyTrial(deepspeed.DeepSpeedTrial):
                def __init__(self, context):
                    self.context = context
                    model = torch.nn.Linear(4, 1)
                    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
                    self.engine = context.wrap_model_engine(engine)

                def build_training_data_loader(self):
                    return pytorch.DataLoader(dataset, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

                def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
                    inputs, labels = self.context.to_device(next(dataloader_iter))
                    loss = torch.nn.functional.mse_loss(self.engine(inputs), labels)
                    self.engine.backward(loss)
                    self.engine.step()
                    return {"loss": loss}
    """

    trial_context_class = DeepSpeedTrialContext

    @abc.abstractmethod
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        """Build and wrap the engines, then call ``context.set_mpu()`` and other switches if needed."""

    @abc.abstractmethod
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        """Train on the next micro batch: forward, ``engine.backward(loss)``, ``engine.step()``.

        With gradient accumulation, it is called for each micro batch of a batch, with the same ``batch_idx``; after
        ``context.disable_auto_grad_accumulation()``, once for all of them. With a pipeline, call
        ``engine.train_batch(dataloader_iter)``, which takes its micro batches itself.

        Args:
            dataloader_iter: iterator over micro batches: ``context.to_device(next(dataloader_iter))``. None on a rank
                without a loader.
            epoch_idx: index of the epoch, from 0.
            batch_idx: index of the batch, from 0, over all resumes.

        Returns:
            the metrics by name, with the same names in every call; or the loss alone. Only reporting ranks count.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader | None:
        """Return the training data in micro batches. Called once on the ranks that build loaders."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader | None:
        """Return the validation data. Called once on the ranks that build loaders."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """Return the validation metrics of the next batch by name: numbers, or tensors of one value.

        The number of calls is equal on all ranks; the rank with the fewest batches determines it.

        Args:
            dataloader_iter: as in :meth:`train_batch`; for a pipeline's ``engine.eval_batch(dataloader_iter)``.
            batch_idx: index of the batch on this rank, from 0. This parameter is optional.
        """
        return super().evaluate_batch(dataloader_iter, batch_idx)

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Save the engines. Called on every rank; override it and :meth:`load` to save more.

        Args:
            context: the context, with the engines in ``context.models``.
            path: directory of this rank; a checkpoint is the union of all ranks' directories.
        """
        for i, engine in enumerate(context.models):
            engine.save_checkpoint(path, tag=f"model{i}")

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Load the files of :meth:`save`. Called on every rank.

        Args:
            context: the context, with the engines in ``context.models``.
            load_path: directory with the files of all ranks.
        """
        saved = len([path for path in Path(load_path).glob("model*") if path.name[5:].isdecimal()])
        if saved != len(context.models):
            raise CheckpointError(f"{load_path} has {saved} engine(s), but the trial has wrapped {len(context.models)}")
        for i, engine in enumerate(context.models):
            try:
                if engine.load_checkpoint(load_path, tag=f"model{i}")[0] is None:
                    raise FileNotFoundError("nothing to load")
            except Exception as e:
                if is_broken_collective(e):  # the rank that left reports the cause
                    raise
                raise CheckpointError(
                    f"{load_path}/model{i} does not fit engine {i}: was it written with another model or ZeRO stage? "
                    f"(DeepSpeed: {type(e).__name__}: {e})"
                ) from e
