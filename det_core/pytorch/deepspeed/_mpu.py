"""Which share of the data a rank works on, and what it contributes, where models are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from det_core import core


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
