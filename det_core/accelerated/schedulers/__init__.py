"""Schedulers of learning rates, or other numbers in parameter groups, stepped after every update."""

from det_core.accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from det_core.accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from det_core.accelerated.schedulers.wsd_scheduler import WSDLrScheduler

__all__ = ["CosineLrScheduler", "SchedulerBase", "StatefulSchedulerBase", "WSDLrScheduler"]
