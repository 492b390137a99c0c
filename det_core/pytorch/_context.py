"""What a PyTorchTrial is given: wraps, the backward pass and the optimizer step, beside what every trial is given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_core import core
from det_core._training.devices import mover
from det_core._training.precision import autocast_forward
from det_core._training.strategy import OneProcess, parameters_of
from det_core.errors import InternalException, InvalidExperimentException
from det_core.pytorch._lr_scheduler import LRScheduler
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")


class PyTorchTrialContext(TrialContext):
    """What a trial needs at run time. Made by :func:`det_core.pytorch.init`.

    Attributes:
        distributed: the ranks.
        device: where models and batches go.
        models, optimizers, lr_schedulers: what was wrapped, in that order.
        experimental: switches that the class of the original keeps apart.
        profiler: the core's, which samples the machine.
    """

    _any_loader_call = "context.experimental.disable_dataset_reproducibility_checks()"

    def __init__(
        self,
        core_context: core.Context,
        strategy: OneProcess,
        *,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        aggregation_frequency: int = 1,
        enable_tensorboard_logging: bool = True,
        horovod: Any = None,
    ) -> None:
        if isinstance(aggregation_frequency, bool) or not isinstance(aggregation_frequency, int):
            raise TypeError(f"aggregation_frequency must be an integer, not {aggregation_frequency!r}")
        if aggregation_frequency < 1:
            raise ValueError(f"aggregation_frequency={aggregation_frequency}: expected at least 1")
        super().__init__(
            core_context, strategy.device, hparams=hparams, exp_conf=exp_conf,
            enable_tensorboard_logging=enable_tensorboard_logging,
        )  # fmt: skip
        self._strategy = strategy
        self._aggregation = aggregation_frequency
        self._horovod = horovod
        self._fp16_compression_default = False
        self._average_gradients_default = True
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.experimental = PyTorchExperimentalContext(self)
        self._averages: dict[int, bool] = {}
        self._unchecked: set[int] = set()
        """Optimizers that have not stepped yet."""
        self._scaler: Any = None
        self._scaler_from = ""
        self._auto_amp: torch.dtype | None = None
        self._auto_to_device = True
        self._updates: bool | None = None
        """Whether the batch that is trained is one at which optimizers step; None: before training."""
        self._global_batch_size, self._slot_batch_size = _batch_sizes(self._hparams, self.distributed.size)

    @property
    def _current_batch_idx(self) -> int | None:
        """As :meth:`current_train_batch`; trials and their tests read it under this name, and the next."""
        return self._batch

    @property
    def _aggregation_frequency(self) -> int:
        return self._aggregation

    # wrapping

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and spread it over the ranks; returns what is to be called in its place."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"wrap_model() takes a torch.nn.Module, not {type(model).__name__}")
        if self._auto_amp is not None:
            autocast_forward(model, self.device.type, self._auto_amp)
        wrapped = self._strategy.wrap(model)
        self.models.append(wrapped)
        return wrapped

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> Optimizer:
        """Register an optimizer; returns what is to be stepped in its place.

        Args:
            optimizer: of parameters of wrapped models.
            backward_passes_per_step: how often ``train_batch`` calls backward before it steps; needed with Horovod.
            fp16_compression: send gradients as float16; Horovod only. Left out: as the configuration says, else no.
            average_aggregated_gradients: divide gradients that were aggregated over batches by their number. Left out:
                as the configuration says, else yes.
        """
        if backward_passes_per_step < 1:
            raise InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step={backward_passes_per_step}): expected at least 1"
            )
        average = average_aggregated_gradients
        if self._horovod is not None and self.distributed.size > 1:
            compress = self._fp16_compression_default if fp16_compression is None else fp16_compression
            optimizer = self._distributed_optimizer(optimizer, backward_passes_per_step, compress)
        self._averages[id(optimizer)] = self._average_gradients_default if average is None else average
        self.optimizers.append(optimizer)
        self._unchecked.add(id(optimizer))
        return optimizer

    def _distributed_optimizer(self, optimizer: Optimizer, passes: int, compress: bool) -> Optimizer:
        hvd = self._horovod
        wrapped: Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[named for i, m in enumerate(self.models) for named in m.named_parameters(prefix=str(i))],
            backward_passes_per_step=passes * self._aggregation,
            compression=hvd.Compression.fp16 if compress else hvd.Compression.none,
        )
        return wrapped

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: Any, frequency: int = 1) -> Any:
        """Register a learning rate scheduler; returns the very scheduler.

        Args:
            lr_scheduler: of an optimizer that was wrapped.
            step_mode: a ``LRScheduler.StepMode``: what ``frequency`` counts.
            frequency: step at every so many of them.

        Raises:
            InvalidExperimentException: its optimizer was not wrapped, or it cannot be stepped in that mode.
        """
        wrapper = LRScheduler(lr_scheduler, step_mode, frequency)
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if optimizer is not None and all(optimizer is not known for known in self.optimizers):
            raise InvalidExperimentException(
                f"wrap_lr_scheduler(): the optimizer of this {type(lr_scheduler).__name__} was not wrapped; "
                "give the scheduler what context.wrap_optimizer() returned"
            )
        self.lr_schedulers.append(wrapper)
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a ``torch.amp.GradScaler``, whose state is saved and restored; scaling is up to ``train_batch``."""
        self._take_scaler(scaler, "wrap_scaler()")
        return scaler

    def _take_scaler(self, scaler: Any, method: str) -> None:
        if self._scaler is not None:
            raise InvalidExperimentException(f"{method}: there is a scaler already, by {self._scaler_from}")
        if self.models:
            raise InvalidExperimentException(f"call {method} before wrap_model()")
        self._scaler, self._scaler_from = scaler, method

    def configure_apex_amp(
        self, models: Any, optimizers: Any, enabled: bool = True, *_ignored: Any, **_too: Any
    ) -> tuple[Any, Any]:
        """Refused: apex is not supported. With ``enabled=False``, returns its two arguments, as apex does."""
        if enabled:
            raise InvalidExperimentException(
                "apex is not supported: use PyTorch's own mixed precision, by context.experimental.use_amp() before "
                "wrap_model(), or by torch.autocast() in train_batch() and context.wrap_scaler(torch.amp.GradScaler())"
            )
        return models, optimizers

    # training

    def backward(
        self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute gradients, as ``loss.backward()`` does; ranks exchange them at batches at which optimizers step."""
        if self._auto_amp is not None and self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._strategy.backward(loss, gradient, retain_graph, create_graph)

    def step_optimizer(
        self,
        optimizer: Optimizer,
        clip_grads: Callable[[list[Tensor]], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step an optimizer, at every ``aggregation_frequency``-th batch; at the others this does nothing.

        Args:
            optimizer: what ``wrap_optimizer`` returned.
            clip_grads: called with the list of its parameters, before the step.
            auto_zero_grads: set the gradients to zero afterwards.
            scaler: the wrapped scaler, if scaling is up to ``train_batch``.

        Raises:
            InternalException: before training.
            InvalidExperimentException: the optimizer was not wrapped; ``auto_zero_grads=False`` with gradients
                aggregated over batches.
        """
        if self._updates is None:
            raise InternalException("step_optimizer() was called before training")
        if id(optimizer) not in self._averages:
            raise InvalidExperimentException("step_optimizer() takes what context.wrap_optimizer() returned")
        if self._aggregation > 1:
            if not auto_zero_grads:
                raise InvalidExperimentException("auto_zero_grads=False cannot be used with aggregation_frequency > 1")
            if not self._updates:
                return
            self._average(optimizer)
        if id(optimizer) in self._unchecked:
            self._unchecked.remove(id(optimizer))
            self._strategy.check_averaged(self.models, [optimizer])
        if scaler is None and self._auto_amp is not None:
            scaler = self._scaler
        if clip_grads is not None:
            if scaler is not None and self._auto_amp is not None:
                scaler.unscale_(optimizer)
            clip_grads([p for group in optimizer.param_groups for p in group["params"]])
        if self._horovod is None:
            self._strategy.step(optimizer, scaler)
        else:
            self._step_distributed(optimizer, scaler)
        if auto_zero_grads:
            optimizer.zero_grad()

    def _average(self, optimizer: Optimizer) -> None:
        """Divide aggregated gradients by the number of batches. Horovod exchanges them first."""
        if self._horovod is not None and self.distributed.size > 1:
            optimizer.synchronize()
        if self._averages.get(id(optimizer), True):
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad /= self._aggregation

    def _step_distributed(self, optimizer: Any, scaler: Any) -> None:
        if self._aggregation == 1 or self.distributed.size == 1:
            self._strategy.step(optimizer, scaler)
            return
        with optimizer.skip_synchronize():  # that is done
            self._strategy.step(optimizer, scaler)

    # what the runner asks for

    def _evaluating(self) -> AbstractContextManager[Any]:
        return self._strategy.evaluating(self.models)

    def _aggregated(self) -> list[Tensor | None]:
        """This rank's gradients of the batches since optimizers last stepped."""
        return [None if p.grad is None else p.grad.detach().cpu() for p in parameters_of(self.optimizers)]

    def _go_on_with(self, aggregated: Sequence[Tensor | None]) -> None:
        """Put back what :meth:`_aggregated` gave."""
        for parameter, gradient in zip(parameters_of(self.optimizers), aggregated, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _begin_alike(self) -> None:
        """Without gradients of an earlier fit; with Horovod, which leaves that to its user, rank 0's models."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._horovod is None or self.distributed.size == 1:
            return
        for model in self.models:
            self._horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        for optimizer in self.optimizers:
            self._horovod.broadcast_optimizer_state(optimizer, root_rank=0)

    def _mover(self) -> Callable[[Any], Any]:
        """What moves a batch, decided once."""
        return mover(self.device, self._not_moved) if self._auto_to_device else lambda batch: batch


class PyTorchExperimentalContext:
    """Switches of a :class:`PyTorchTrialContext`, as ``context.experimental``."""

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent

    def disable_auto_to_device(self) -> None:
        """Give batches to ``train_batch`` and ``evaluate_batch`` as the loader makes them."""
        self._parent._auto_to_device = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from ``build_…_data_loader()``; it is used as it is, neither sharded nor skipped into."""
        self._parent._any_loader = True

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Use mixed precision without a change to ``train_batch``: autocast, and a scaler where float16 needs one.

        Call it before ``wrap_model``. On a CPU it does nothing unless ``dtype`` is given.

        Args:
            dtype: what autocast computes in; left out: float16 on a GPU. ``torch.bfloat16`` needs no scaler.
        """
        parent = self._parent
        on_cpu = parent.device.type == "cpu"
        half = dtype in (None, torch.float16) and not on_cpu
        parent._take_scaler(torch.amp.GradScaler(parent.device.type, enabled=half), "experimental.use_amp()")
        if not on_cpu or dtype is not None:
            parent._auto_amp = torch.float16 if dtype is None else dtype


def _batch_sizes(hparams: Mapping[str, Any] | None, size: int) -> tuple[int | None, int | None]:
    """Records in a batch of all ranks, and of one."""
    if not hparams or "global_batch_size" not in hparams:
        return None, None
    wanted = hparams["global_batch_size"]
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise InvalidExperimentException(f"global_batch_size must be an integer, not {wanted!r}")
    if wanted < size:
        raise InvalidExperimentException(
            f"global_batch_size is {wanted}, less than one record for each of {size} ranks"
        )
    slot = wanted // size
    if slot * size != wanted:
        logger.warning("global_batch_size is %d, as %d is not divisible by %d ranks", slot * size, wanted, size)
    return slot * size, slot
