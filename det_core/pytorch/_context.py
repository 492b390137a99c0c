"""Context of a PyTorchTrial: wrapping, the backward pass, and optimizer steps."""

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
    """Context of a trial at run time, made by :func:`det_core.pytorch.init`.

    Attributes:
        distributed: the ranks.
        device: device of models and batches.
        models, optimizers, lr_schedulers: wrapped objects, in order.
        experimental: further switches.
        profiler: ``ctx.profiler``, which samples the machine.
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
        """IDs of optimizers that have not stepped yet."""
        self._scaler: Any = None
        self._scaler_from = ""
        self._auto_amp: torch.dtype | None = None
        self._auto_to_device = True
        self._updates: bool | None = None
        """True if optimizers step at the current batch; None before training."""
        self._global_batch_size, self._slot_batch_size = _batch_sizes(self._hparams, self.distributed.size)

    @property
    def _current_batch_idx(self) -> int | None:
        # Trials and their tests read these two private names.
        return self._batch

    @property
    def _aggregation_frequency(self) -> int:
        return self._aggregation

    # wrapping

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and distribute it over the ranks; return the model to call instead."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"wrap_model() takes a torch.nn.Module, not {type(model).__name__}")
        if self._auto_amp is not None:
            # Before wrapping: DDP calls the forward method of the model.
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
        """Register an optimizer; return the optimizer to step instead.

        Args:
            optimizer: an optimizer of parameters of wrapped models.
            backward_passes_per_step: number of backward passes in ``train_batch`` before a step; used with Horovod.
            fp16_compression: send gradients as float16 with Horovod. Defaults to the configuration's value, or False.
            average_aggregated_gradients: divide gradients aggregated over batches by the number of batches. Defaults to
                the configuration's value, else True.
        """
        if backward_passes_per_step < 1:
            raise InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step={backward_passes_per_step}): expected at least 1"
            )
        if fp16_compression is None:
            fp16_compression = self._fp16_compression_default
        if average_aggregated_gradients is None:
            average_aggregated_gradients = self._average_gradients_default
        if self._horovod is not None and self.distributed.size > 1:
            optimizer = self._distributed_optimizer(optimizer, backward_passes_per_step, fp16_compression)
        self._averages[id(optimizer)] = average_aggregated_gradients
        self.optimizers.append(optimizer)
        self._unchecked.add(id(optimizer))
        return optimizer

    def _distributed_optimizer(self, optimizer: Optimizer, passes: int, compress: bool) -> Optimizer:
        hvd = self._horovod
        compression = hvd.Compression.none
        if compress:
            compression = hvd.Compression.fp16
        wrapped: Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[named for i, m in enumerate(self.models) for named in m.named_parameters(prefix=str(i))],
            backward_passes_per_step=passes * self._aggregation,  # Horovod exchanges after this many
            compression=compression,
        )
        return wrapped

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: Any, frequency: int = 1) -> Any:
        """Register a learning rate scheduler, and return it.

        Args:
            lr_scheduler: scheduler of a wrapped optimizer.
            step_mode: a ``LRScheduler.StepMode``, the unit of ``frequency``.
            frequency: number of units between two steps.

        Raises:
            InvalidExperimentException: If its optimizer is not wrapped, or the scheduler does not support the mode.
        """
        wrapper = LRScheduler(lr_scheduler, step_mode, frequency)
        optimizer = getattr(lr_scheduler, "optimizer", None)
        # Compared by identity: optimizers do not define equality.
        if optimizer is not None and all(optimizer is not known for known in self.optimizers):
            raise InvalidExperimentException(
                f"wrap_lr_scheduler(): the optimizer of this {type(lr_scheduler).__name__} was not wrapped; "
                "give the scheduler what context.wrap_optimizer() returned"
            )
        self.lr_schedulers.append(wrapper)
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a ``torch.amp.GradScaler`` to save and restore its state; ``train_batch`` does the scaling."""
        self._take_scaler(scaler, "wrap_scaler()")
        return scaler

    def _take_scaler(self, scaler: Any, method: str) -> None:
        if self._scaler is not None:
            raise InvalidExperimentException(f"{method}: a scaler exists already, from {self._scaler_from}")
        if self.models:
            raise InvalidExperimentException(f"call {method} before wrap_model()")
        self._scaler = scaler
        self._scaler_from = method

    def configure_apex_amp(
        self, models: Any, optimizers: Any, enabled: bool = True, *_ignored: Any, **_too: Any
    ) -> tuple[Any, Any]:
        """Reject apex, which is not supported; with ``enabled=False``, return both arguments as apex does."""
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
        """Compute gradients as ``loss.backward()`` does; at batches with a step, exchange them among ranks."""
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
        """Step an optimizer at every ``aggregation_frequency``-th batch; do nothing at the others.

        Args:
            optimizer: return value of ``wrap_optimizer``.
            clip_grads: called before the step with the list of the optimizer's parameters.
            auto_zero_grads: set the gradients to zero after the step.
            scaler: the wrapped scaler, if ``train_batch`` does the scaling.

        Raises:
            InternalException: If training has not begun.
            InvalidExperimentException: If the optimizer is not wrapped, or with ``auto_zero_grads=False`` and gradients
                aggregated over batches.
        """
        if self._updates is None:
            raise InternalException("step_optimizer() was called before training")
        if id(optimizer) not in self._averages:
            raise InvalidExperimentException("step_optimizer(): expected the return value of context.wrap_optimizer()")
        if self._aggregation > 1:
            if not auto_zero_grads:
                raise InvalidExperimentException("auto_zero_grads=False cannot be used with aggregation_frequency > 1")
            if not self._updates:
                return
            self._average(optimizer)
        if id(optimizer) in self._unchecked:
            # Once: it catches a part of the model trained past DDP, whose gradients would differ between ranks.
            self._unchecked.remove(id(optimizer))
            self._strategy.check_averaged(self.models, [optimizer])
        if scaler is None and self._auto_amp is not None:
            scaler = self._scaler
        if clip_grads is not None:
            if scaler is not None and self._auto_amp is not None:
                scaler.unscale_(optimizer)  # clipping needs the true gradients
            clip_grads([p for group in optimizer.param_groups for p in group["params"]])
        if self._horovod is None:
            self._strategy.step(optimizer, scaler)
        else:
            self._step_distributed(optimizer, scaler)
        if auto_zero_grads:
            optimizer.zero_grad()

    def _average(self, optimizer: Optimizer) -> None:
        """Divide aggregated gradients by the number of batches."""
        if self._horovod is not None and self.distributed.size > 1:
            optimizer.synchronize()  # ends the exchange, which writes to the gradients
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
        with optimizer.skip_synchronize():  # _average() did it
            self._strategy.step(optimizer, scaler)

    # Called by the runner.

    def _evaluating(self) -> AbstractContextManager[Any]:
        return self._strategy.evaluating(self.models)

    def _aggregated(self) -> list[Tensor | None]:
        """Return this rank's gradients of the batches since the last step of optimizers."""
        gradients: list[Tensor | None] = []
        for parameter in parameters_of(self.optimizers):
            gradients.append(None)
            if parameter.grad is not None:
                gradients[-1] = parameter.grad.detach().cpu()
        return gradients

    def _restore_gradients(self, aggregated: Sequence[Tensor | None]) -> None:
        """Restore the return value of :meth:`_aggregated`."""
        for parameter, gradient in zip(parameters_of(self.optimizers), aggregated, strict=True):
            parameter.grad = None
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device)

    def _prepare_new_training(self) -> None:
        """Clear gradients of an earlier fit, and give all ranks the chief's models and optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._horovod is None or self.distributed.size == 1:
            return  # DDP broadcasts when a model is wrapped; Horovod leaves it to its user
        for model in self.models:
            self._horovod.broadcast_parameters(model.state_dict(), root_rank=0)
        for optimizer in self.optimizers:
            self._horovod.broadcast_optimizer_state(optimizer, root_rank=0)

    def _mover(self) -> Callable[[Any], Any]:
        """Return the function that moves batches to the device."""
        if self._auto_to_device:
            return mover(self.device, self._not_moved)
        return lambda batch: batch


class PyTorchExperimentalContext:
    """Switches of a :class:`PyTorchTrialContext`, as ``context.experimental``."""

    def __init__(self, parent: PyTorchTrialContext) -> None:
        self._parent = parent

    def disable_auto_to_device(self) -> None:
        """Pass batches to ``train_batch`` and ``evaluate_batch`` without moving them to the device."""
        self._parent._auto_to_device = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from ``build_…_data_loader()``, used without sharding and skipping."""
        self._parent._any_loader = True

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Use mixed precision without changes to ``train_batch``: autocast, and a scaler if float16 needs one.

        Call it before ``wrap_model``. On a CPU it has no effect without ``dtype``.

        Args:
            dtype: type that autocast computes in. Defaults to float16 on a GPU. ``torch.bfloat16`` uses no scaler.
        """
        parent = self._parent
        on_cpu = parent.device.type == "cpu"
        half = dtype in (None, torch.float16) and not on_cpu  # bfloat16 has the range of float32
        parent._take_scaler(torch.amp.GradScaler(parent.device.type, enabled=half), "experimental.use_amp()")
        if not on_cpu or dtype is not None:
            parent._auto_amp = dtype or torch.float16


def _batch_sizes(hparams: Mapping[str, Any] | None, size: int) -> tuple[int | None, int | None]:
    """Return the number of records in a batch of all ranks, and of one."""
    if not hparams or "global_batch_size" not in hparams:
        return None, None
    wanted = hparams["global_batch_size"]
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise InvalidExperimentException(f"global_batch_size={wanted!r}: expected an integer")
    if wanted < size:
        raise InvalidExperimentException(
            f"global_batch_size={wanted}: expected at least one record for each of {size} ranks"
        )
    slot = wanted // size
    if slot * size != wanted:
        logger.warning("global_batch_size %d is not divisible by %d ranks: using %d", wanted, size, slot * size)
    return slot * size, slot
