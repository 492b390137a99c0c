"""Fixtures that timm's trainings share with others."""

from __future__ import annotations

from support.torch_once import a_small_heap, an_optimizer, no_accelerator_stays

__all__ = ["a_small_heap", "an_optimizer", "no_accelerator_stays"]
