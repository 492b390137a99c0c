"""What a DeepSpeedTrial is given, and ``init()``, which opens it: its engines, and how data is shared."""

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
from det_core.pytorch._trainer import opened, tensorboard_is_there, told
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")


class DeepSpeedTrialContext(TrialContext):
    """What a trial needs at run time. Made by ``det_core.pytorch.deepspeed.init()``.

    Attributes:
        distributed: the ranks.
        device: this rank's, as DeepSpeed's accelerator says.
        models: the engines that were wrapped, in that order.
        use_pipeline_parallel: whether one of them is a pipeline.
        profiler: the core's, which samples the machine.
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
        """Records in a micro batch, and micro batches in a batch, of one data parallel rank."""
        self._auto_accumulation = True
        self.use_pipeline_parallel = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeepSpeedTrialContext:
        """A context to call a trial's methods by hand with, in one process.

        It has the core context that is open, else one of its own, which stays open until the process ends.

        Args:
            config: an experiment's configuration; each hyperparameter one value, or ``{"type": "const", "val": …}``.

        Raises:
            ValueError: a hyperparameter is to be searched over.
        """
        stack = ExitStack()
        hparams = _values(config.get("hyperparameters") or {}, "hyperparameters")
        context = stack.enter_context(init(hparams=hparams, exp_conf=config, enable_tensorboard_logging=False))
        atexit.register(stack.close)
        return context

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine of DeepSpeed's; returns it.

        The first one says how large batches are, and, if it is a pipeline, which ranks read data.

        Args:
            model: what ``deepspeed.initialize`` returned first.

        Raises:
            TypeError: it is something else.
        """
        import deepspeed
        from deepspeed.runtime.pipe.engine import PipelineEngine

        if not isinstance(model, deepspeed.DeepSpeedEngine):
            raise TypeError(
                f"wrap_model_engine() takes a DeepSpeedEngine, the first of what deepspeed.initialize() returns, not "
                f"a {type(model).__name__}"
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
                "engine %d has micro batches of %d and accumulates %d of them, the first engine %d and %d: the first "
                "one's count",
                len(self.models), *sizes, *self._sizes,
            )  # fmt: skip
        engine = model.to(self.device)
        self.models.append(engine)
        return engine

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Say which share of the data this rank works on, and what it contributes, on each rank.

        Needed only where models are spread over ranks otherwise than by DeepSpeed's pipelines.

        Args:
            mpu: this rank's; it corresponds to the first engine.

        Raises:
            InvalidExperimentException: no engine was wrapped yet, or there is a unit already.
        """
        if not isinstance(mpu, ModelParallelUnit):
            raise TypeError(f"set_mpu() takes a ModelParallelUnit, not a {type(mpu).__name__}")
        if not self.models:
            raise InvalidExperimentException("set_mpu() comes after context.wrap_model_engine(): no engine is wrapped")
        if self._mpu_given:
            raise InvalidExperimentException("set_mpu() was called before: a trial has one ModelParallelUnit")
        self._mpu = mpu
        self._mpu_given = True

    wrap_mpu = set_mpu

    def disable_auto_grad_accumulation(self) -> None:
        """Have ``train_batch`` called once a batch, which then trains all its micro batches itself."""
        self._auto_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any loader from ``build_…_data_loader()``; it is used as it is, neither sharded nor skipped into."""
        self._any_loader = True

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Records in a micro batch of one data parallel rank, as the first engine says.

        Raises:
            InvalidExperimentException: no engine was wrapped yet.
        """
        return self._size("get_train_micro_batch_size_per_gpu()", 0)

    def get_num_micro_batches_per_slot(self) -> int:
        """Micro batches in a batch: the first engine's ``gradient_accumulation_steps``.

        Raises:
            InvalidExperimentException: no engine was wrapped yet.
        """
        return self._size("get_num_micro_batches_per_slot()", 1)

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Deprecated: :meth:`get_train_micro_batch_size_per_gpu`."""
        _tell_deprecated("train_micro_batch_size_per_gpu")
        return self.get_train_micro_batch_size_per_gpu()

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Deprecated: :meth:`get_num_micro_batches_per_slot`."""
        _tell_deprecated("num_micro_batches_per_slot")
        return self.get_num_micro_batches_per_slot()

    # names of the original's own, which published trials read
    _train_micro_batch_size_per_gpu = property(get_train_micro_batch_size_per_gpu)
    _num_micro_batches_per_slot = property(get_num_micro_batches_per_slot)

    def _size(self, method: str, which: int) -> int:
        if self._sizes is None:
            raise InvalidExperimentException(f"{method} comes after context.wrap_model_engine(): no engine is wrapped")
        return self._sizes[which]


@dataclass
class ModelParallelUnit:
    """A rank's place in a model parallel training; see ``DeepSpeedTrialContext.set_mpu()``.

    Attributes:
        data_parallel_rank: which share of the batches this rank works on; ranks that hold parts of one model have the
            same.
        data_parallel_world_size: how many shares there are.
        should_report_metrics: whether what ``train_batch`` and ``evaluate_batch`` return here counts.
        should_build_data_loader: whether data loaders are built here; elsewhere these methods get None for the
            iterator.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist_context: core.DistributedContext) -> ModelParallelUnit:
    """The unit of a training in which every rank works on data of its own: what ranks have unless another is set.

    Args:
        dist_context: the ranks.
    """
    return ModelParallelUnit(dist_context.rank, dist_context.size, True, True)


def make_deepspeed_mpu(mpu: Any) -> ModelParallelUnit:
    """The unit of DeepSpeed's pipeline parallelism: data is read by the first stage and by the last.

    DeepSpeed broadcasts the loss to all ranks of a pipeline, so each of them reports.

    Args:
        mpu: a pipeline engine's ``grid``, or another of DeepSpeed's ``PipelineParallelGrid``.
    """
    at_an_end = mpu.get_pipe_parallel_rank() in (0, mpu.get_pipe_parallel_world_size() - 1)
    return ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=True,
        should_build_data_loader=at_an_end and mpu.get_slice_parallel_rank() == 0,
    )


@functools.cache
def _tell_deprecated(name: str) -> None:
    """Once a process: trials read these in every batch."""
    logger.warning("context.%s is deprecated: add get_ and ()", name)


def _values(space: Any, name: str) -> Any:
    """One trial's hyperparameters, constants unpacked."""
    if not isinstance(space, Mapping):
        return space
    if not isinstance(space.get("type"), str):
        return {key: _values(value, f"{name}.{key}") for key, value in space.items()}
    if space["type"] != "const":
        raise ValueError(f"{name} is to be searched over ({space['type']}): give from_config() one value")
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
    """Open what a trial needs, as ``with deepspeed.init(hparams={…}) as context:``.

    As ``det_core.pytorch.init()``. Under a launcher (``det_core.launch.deepspeed``, ``torch_distributed``, or their
    own) DeepSpeed's process group is made here, unless there is one or DET_MANUAL_INIT_DISTRIBUTED is set.

    Args:
        hparams, exp_conf, distributed, enable_tensorboard_logging, core_context, core_options: as there.
        allow_pickle: also start from checkpoints of others, whose files DeepSpeed reads as pickles, which run code.
            Left out: as DET_CORE_ALLOW_PICKLE says, else only from those of this run and its experiment.

    Raises:
        MissingExtra: DeepSpeed is not installed.
        InvalidExperimentException: DeepSpeed's accelerator is not usable here.
        ValueError: as there.
    """
    deepspeed = require("deepspeed", extra="deepspeed", purpose="a DeepSpeedTrial")
    accelerator = deepspeed.get_accelerator()
    if not accelerator.is_available():
        raise InvalidExperimentException(
            f"DeepSpeed's accelerator is {accelerator.device_name()}, and there is none here: on a machine without "
            "GPUs set DS_ACCELERATOR=cpu"
        )
    with ExitStack() as stack:
        context = opened(
            stack, core_context, distributed, core_options, lambda ranks: _make_group(stack, deepspeed, ranks), hparams
        )
        hparams, exp_conf = told(context, hparams, exp_conf)
        yield DeepSpeedTrialContext(
            context,
            torch.device(accelerator.current_device_name()),
            hparams=hparams,
            exp_conf=exp_conf,
            enable_tensorboard_logging=enable_tensorboard_logging and tensorboard_is_there(),
            allow_pickle=allow_pickle,
        )


def _make_group(stack: ExitStack, deepspeed: Any, ranks: core.DistributedContext) -> None:
    """Make DeepSpeed's process group, unless there is one; also for a single rank, as engines need one."""
    accelerator = deepspeed.get_accelerator()
    set_local_rank(ranks.local_rank)
    if accelerator.device_name() != "cpu":
        accelerator.set_device(ranks.local_rank)
    if Environment.read().launch.get("DET_MANUAL_INIT_DISTRIBUTED"):
        return
    if not torch.distributed.is_initialized():
        alone = torch.distributed.HashStore() if ranks.size == 1 else None  # it has nobody to meet
        torch.distributed.init_process_group(
            accelerator.communication_backend_name(), rank=ranks.rank, world_size=ranks.size, store=alone,
            timeout=deepspeed.constants.default_pg_timeout,
        )  # fmt: skip
        atexit.register(destroy_group)
        stack.push(lambda kind, _error, _trace: None if kind is None else destroy_group())
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
