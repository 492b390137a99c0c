"""Machines and a Slurm for the tests of launchers."""

from __future__ import annotations

from support.hosts import hosts
from support.slurm import slurm

__all__ = ["hosts", "slurm"]
