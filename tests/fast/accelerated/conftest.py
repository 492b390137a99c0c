"""Tests of what knows torch and accelerate."""

from __future__ import annotations

import pytest

from support.torch_once import a_small_heap, an_optimizer, no_accelerator_stays

__all__ = ["a_small_heap", "an_optimizer", "no_accelerator_stays"]

pytest.importorskip("torch")
pytest.importorskip("accelerate")
