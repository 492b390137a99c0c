"""Tests of what knows torch."""

from support.torch_once import an_optimizer

__all__ = ["an_optimizer"]
