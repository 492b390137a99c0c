"""``python -m det_core.slurm job`` and ``node``: what a chain's batch file runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from det_core.slurm import _job, _node

PROGRAMS: dict[str, Callable[..., int]] = {"job": _job.main, "node": _node.main}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
