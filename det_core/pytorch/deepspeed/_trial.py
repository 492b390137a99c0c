"""The class that a user of DeepSpeed writes."""

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
    """A training by DeepSpeed engines. Subclass it, and hand an instance to ``det_core.pytorch.deepspeed.Trainer``.

    ``__init__`` builds the engines by ``deepspeed.initialize``, and gives each to ``context.wrap_model_engine``: what
    is wrapped is saved and restored. Engines carry optimizers, schedulers, precision and the exchange of gradients, so
    nothing else is wrapped. One of :meth:`evaluate_batch` and :meth:`evaluate_full_dataset` is to be overridden.

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
        """Build the engines and wrap each; then, if need be, ``context.set_mpu()`` and the context's switches."""

    @abc.abstractmethod
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        """Train on the next micro batch: forward, ``engine.backward(loss)``, ``engine.step()``.

        With gradient accumulation this is called once for each micro batch of a batch, with the same ``batch_idx``;
        after ``context.disable_auto_grad_accumulation()``, once for all of them. With a pipeline it is
        ``engine.train_batch(dataloader_iter)``, which takes its micro batches itself.

        Args:
            dataloader_iter: micro batches as the loader makes them: ``context.to_device(next(dataloader_iter))``. None
                on a rank that builds no loader.
            epoch_idx: the epoch, from 0.
            batch_idx: the batch, from 0, over all resumes.

        Returns:
            the metrics by name, the same names every time; or the loss alone. It counts on reporting ranks only.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader | None:
        """The training data in micro batches; called once, on the ranks that build loaders."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader | None:
        """The validation data; called once, on the ranks that build loaders."""

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """The validation metrics of the next batch, by name; numbers, or tensors of one value.

        Every rank is called equally often: as often as the rank with the fewest batches has some.

        Args:
            dataloader_iter: as in :meth:`train_batch`; for a pipeline's ``engine.eval_batch(dataloader_iter)``.
            batch_idx: the batch, from 0, of this rank in this validation. A method without this parameter is called
                without.
        """
        return super().evaluate_batch(dataloader_iter, batch_idx)

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Save the engines; called on every rank. Override it, and :meth:`load`, to save more.

        Args:
            context: holds the engines, as ``context.models``.
            path: a folder of this rank's; a checkpoint is the union of all ranks'.
        """
        for i, engine in enumerate(context.models):
            engine.save_checkpoint(path, tag=f"model{i}")

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Load what :meth:`save` saved; called on every rank.

        Args:
            context: holds the engines, as ``context.models``.
            load_path: the files of all ranks.
        """
        held = len([path for path in Path(load_path).glob("model*") if path.name[5:].isdecimal()])
        if held != len(context.models):
            raise CheckpointError(
                f"{load_path} holds {held} engine(s), and the trial has wrapped {len(context.models)}"
            )
        for i, engine in enumerate(context.models):
            try:
                if engine.load_checkpoint(load_path, tag=f"model{i}")[0] is None:
                    raise FileNotFoundError("there is nothing to load")
            except Exception as e:
                if is_broken_collective(e):  # of which the rank that has left knows more
                    raise
                raise CheckpointError(
                    f"{load_path}/model{i} does not fit engine {i}: was it written with another model or ZeRO stage? "
                    f"(DeepSpeed: {type(e).__name__}: {e})"
                ) from e
