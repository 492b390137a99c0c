"""Context of a DeepSpeedTrial, and ``init()``: engines, and the distribution of data."""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from det_core import core
from det_core._env import Environment, set_local_rank
from det_core._optional import require
from det_core._training.process_group import destroy_group
from det_core.errors import InvalidExperimentException
from det_core.pytorch._trainer import destroy_after_error, is_tensorboard_installed, open_core_context, trial_settings
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")


class DeepSpeedTrialContext(TrialContext):
    """Context of a trial at run time, made by ``det_core.pytorch.deepspeed.init()``.

    Attributes:
        distributed: the ranks.
        device: device of this rank, from DeepSpeed's accelerator.
        models: wrapped engines, in order.
        use_pipeline_parallel: whether one of them is a pipeline.
        profiler: ``ctx.profiler``, which samples the machine.
    """

    models: list[Any]
    _init = "deepspeed.init"

    def __init__(
        self,
        core_context: core.Context,
        device: torch.device,
        *,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        enable_tensorboard_logging: bool = True,
        allow_pickle: bool | None = None,
    ) -> None:
        super().__init__(
            core_context, device, hparams=hparams, exp_conf=exp_conf,
            enable_tensorboard_logging=enable_tensorboard_logging,
        )  # fmt: skip
        self._allow_pickle = allow_pickle
        self._mpu: ModelParallelUnit = make_data_parallel_mpu(self.distributed)
        self._mpu_given = False
        self._sizes: tuple[int, int] | None = None
        """Records in a micro batch, and micro batches in a batch, of one data parallel rank; None without an engine."""
        self._auto_accumulation = True
        self.use_pipeline_parallel = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeepSpeedTrialContext:
        """Return a context for calling a trial's methods by hand, in one process.

        It uses the open core context, or opens one until the process ends.

        Args:
            config: an experiment configuration whose hyperparameters are values or ``{"type": "const", "val": …}``.

        Raises:
            ValueError: If a hyperparameter is a search space.
        """
        stack = ExitStack()
        hparams = _values(config.get("hyperparameters") or {}, "hyperparameters")
        context = stack.enter_context(init(hparams=hparams, exp_conf=config, enable_tensorboard_logging=False))
        atexit.register(stack.close)
        return context

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine of DeepSpeed, and return it.

        The first engine determines batch sizes, and, if it is a pipeline, the ranks that read data.

        Args:
            model: first return value of ``deepspeed.initialize``.

        Raises:
            TypeError: If it is not an engine.
        """
        import deepspeed
        from deepspeed.runtime.pipe.engine import PipelineEngine

        if not isinstance(model, deepspeed.DeepSpeedEngine):
            raise TypeError(
                f"wrap_model_engine(): expected a DeepSpeedEngine, the first return value of deepspeed.initialize(), "
                f"found a {type(model).__name__}"
            )
        sizes = (model.train_micro_batch_size_per_gpu(), model.gradient_accumulation_steps())
        if isinstance(model, PipelineEngine):
            self.use_pipeline_parallel = True
            if not self.models:
                self._mpu = make_deepspeed_mpu(model.grid)
        if self._sizes is None:
            self._sizes = sizes
            self._slot_batch_size = sizes[0] * sizes[1]
            self._global_batch_size = model.train_batch_size()
        elif self._sizes != sizes:
            logger.warning(
                "engine %d has micro batches of %d and accumulates %d of them, the first engine %d and %d: using the "
                "first engine's",
                len(self.models), *sizes, *self._sizes,
            )  # fmt: skip
        engine = model.to(self.device)
        self.models.append(engine)
        return engine

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Set this rank's share of the data and its role; call it on each rank.

        Only needed if models are distributed over ranks in another way than by DeepSpeed's pipelines.

        Args:
            mpu: unit of this rank, for the first engine.

        Raises:
            InvalidExperimentException: If no engine is wrapped, or a unit is set.
        """
        if not isinstance(mpu, ModelParallelUnit):
            raise TypeError(f"set_mpu(): expected a ModelParallelUnit, found a {type(mpu).__name__}")
        if not self.models:
            raise InvalidExperimentException("call set_mpu() after context.wrap_model_engine(): no engine is wrapped")
        if self._mpu_given:
            raise InvalidExperimentException("set_mpu() called twice: a trial has one ModelParallelUnit")
        self._mpu = mpu
        self._mpu_given = True

    wrap_mpu = set_mpu

    def disable_auto_grad_accumulation(self) -> None:
        """Call ``train_batch`` once for each batch, so that it trains all micro batches itself."""
        self._auto_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from ``build_…_data_loader()``, used without sharding and skipping."""
        self._any_loader = True

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of records in a micro batch of one data parallel rank, from the first engine.

        Raises:
            InvalidExperimentException: If no engine is wrapped.
        """
        return self._size("get_train_micro_batch_size_per_gpu()", 0)

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the number of micro batches in a batch: the first engine's ``gradient_accumulation_steps``.

        Raises:
            InvalidExperimentException: If no engine is wrapped.
        """
        return self._size("get_num_micro_batches_per_slot()", 1)

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Deprecated alias of :meth:`get_train_micro_batch_size_per_gpu`."""
        _warn_deprecated("train_micro_batch_size_per_gpu")
        return self.get_train_micro_batch_size_per_gpu()

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Deprecated alias of :meth:`get_num_micro_batches_per_slot`."""
        _warn_deprecated("num_micro_batches_per_slot")
        return self.get_num_micro_batches_per_slot()

    # Private names of Determined that published trials read.
    _train_micro_batch_size_per_gpu = property(get_train_micro_batch_size_per_gpu)
    _num_micro_batches_per_slot = property(get_num_micro_batches_per_slot)

    def _size(self, method: str, which: int) -> int:
        if self._sizes is None:
            raise InvalidExperimentException(f"call {method} after context.wrap_model_engine(): no engine is wrapped")
        return self._sizes[which]


@dataclass
class ModelParallelUnit:
    """Position of a rank in a model parallel training; see ``DeepSpeedTrialContext.set_mpu()``.

    Attributes:
        data_parallel_rank: this rank's share of the batches, equal on ranks with parts of the same model.
        data_parallel_world_size: number of shares.
        should_report_metrics: whether the metrics of ``train_batch`` and ``evaluate_batch`` count on this rank.
        should_build_data_loader: whether this rank builds data loaders; without, these methods get None as iterator.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist_context: core.DistributedContext) -> ModelParallelUnit:
    """Return the default unit, with which every rank has its own share of the data.

    Args:
        dist_context: the ranks.
    """
    return ModelParallelUnit(dist_context.rank, dist_context.size, True, True)


def make_deepspeed_mpu(mpu: Any) -> ModelParallelUnit:
    """Return the unit for DeepSpeed's pipelines, whose first and last stages read data.

    DeepSpeed broadcasts the loss to all ranks of a pipeline, so each of them reports.

    Args:
        mpu: ``grid`` of a pipeline engine, or another ``PipelineParallelGrid`` of DeepSpeed.
    """
    at_an_end = mpu.get_pipe_parallel_rank() in (0, mpu.get_pipe_parallel_world_size() - 1)
    return ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=True,
        should_build_data_loader=at_an_end and mpu.get_slice_parallel_rank() == 0,
    )


@functools.cache
def _warn_deprecated(name: str) -> None:  # cached, as trials read these in every batch
    logger.warning("context.%s is deprecated: use get_%s()", name, name)


def _values(space: Any, name: str) -> Any:
    """Return the hyperparameters of one trial, with constants unpacked."""
    if not isinstance(space, Mapping):
        return space
    if not isinstance(space.get("type"), str):
        return {key: _values(value, f"{name}.{key}") for key, value in space.items()}
    if space["type"] != "const":
        raise ValueError(f"{name} is a search space ({space['type']}): pass a value to from_config()")
    return space["val"]


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
    core_context: core.Context | None = None,
    allow_pickle: bool | None = None,
    **core_options: Any,
) -> Iterator[DeepSpeedTrialContext]:
    """Open the context of a trial, as ``with deepspeed.init(hparams={…}) as context:``.

    Like ``det_core.pytorch.init()``. Under a launcher (``det_core.launch.deepspeed``, ``torch_distributed``, or those
    of the frameworks) this makes DeepSpeed's process group, unless it exists or DET_MANUAL_INIT_DISTRIBUTED is set.

    Args:
        hparams, exp_conf, distributed, enable_tensorboard_logging, core_context, core_options: see
            ``det_core.pytorch.init()``.
        allow_pickle: also start from checkpoints of other runs and experiments. DeepSpeed's files are pickles, which
            run code when they are loaded. Defaults to DET_CORE_ALLOW_PICKLE.

    Raises:
        MissingExtra: If DeepSpeed is not installed.
        InvalidExperimentException: If DeepSpeed's accelerator is not usable here.
        ValueError: As in ``det_core.pytorch.init()``.
    """
    deepspeed = require("deepspeed", extra="deepspeed", purpose="a DeepSpeedTrial")
    accelerator = deepspeed.get_accelerator()
    if not accelerator.is_available():
        raise InvalidExperimentException(
            f"DeepSpeed's accelerator {accelerator.device_name()} is not available: on a machine without GPUs set "
            "DS_ACCELERATOR=cpu"
        )
    with ExitStack() as stack:
        context = open_core_context(
            stack, core_context, distributed, core_options, lambda ranks: _make_group(stack, deepspeed, ranks), hparams
        )
        hparams, exp_conf = trial_settings(context, hparams, exp_conf)
        yield DeepSpeedTrialContext(
            context,
            torch.device(accelerator.current_device_name()),
            hparams=hparams,
            exp_conf=exp_conf,
            enable_tensorboard_logging=enable_tensorboard_logging and is_tensorboard_installed(),
            allow_pickle=allow_pickle,
        )


def _make_group(stack: ExitStack, deepspeed: Any, ranks: core.DistributedContext) -> None:
    """Make DeepSpeed's process group, unless it exists; engines need one even for a single rank."""
    accelerator = deepspeed.get_accelerator()
    set_local_rank(ranks.local_rank)
    if accelerator.device_name() != "cpu":
        accelerator.set_device(ranks.local_rank)
    if Environment.read().launch.get("DET_MANUAL_INIT_DISTRIBUTED"):
        return
    if not torch.distributed.is_initialized():
        store = None
        if ranks.size == 1:
            store = torch.distributed.HashStore()  # needs no port and no launcher
        torch.distributed.init_process_group(
            accelerator.communication_backend_name(), rank=ranks.rank, world_size=ranks.size, store=store,
            timeout=deepspeed.constants.default_pg_timeout,
        )  # fmt: skip
        atexit.register(destroy_group)
        destroy_after_error(stack)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
