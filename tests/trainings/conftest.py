"""Whole trainings: what those of trials, those of the Trainer and those on the installed wheel share."""

from __future__ import annotations

from support.environments import dist, installed, wheel
from support.torch_once import a_small_heap, an_optimizer, no_accelerator_stays

__all__ = ["a_small_heap", "an_optimizer", "dist", "installed", "no_accelerator_stays", "wheel"]
