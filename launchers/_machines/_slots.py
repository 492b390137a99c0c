"""How many ranks a machine gets where nobody says so."""

from __future__ import annotations

import os
import re

from det_core._env import Environment

ONE = "no GPU is visible: starting 1 process (--nproc-per-node N starts N)"
"""What to say where there is one rank for want of GPUs."""


def gpus(environment: Environment) -> int:
    """How many GPUs a process here may use."""
    there = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    if environment.cuda_visible_devices is None:
        return there
    named = [part for part in environment.cuda_visible_devices.split(",") if part.strip() not in ("", "-1")]
    return min(there, len(named))
