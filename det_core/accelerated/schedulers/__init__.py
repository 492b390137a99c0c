"""Schedulers of learning rates, or of any other number in an optimizer's groups, that step after every update."""

from det_core.accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from det_core.accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from det_core.accelerated.schedulers.wsd_scheduler import WSDLrScheduler

__all__ = ["CosineLrScheduler", "SchedulerBase", "StatefulSchedulerBase", "WSDLrScheduler"]
