"""What a DeepSpeedTrial's loop keeps of the bare DeepSpeed loop's speed: ZeRO 1 on two ranks, under our launcher.

The model and the data are those of ``trial_loop``. Blocks of 50 steps of ours and of two bare loops take turns in the
same two processes; the two bare loops against each other tell how far the machine can be believed.
Run it with ``python -m benchmarks.deepspeed_loop``; it makes the venv of the frameworks, unless ``FRAMEWORKS_VENV``
names one.
"""

from __future__ import annotations

import os

from benchmarks._peers import frameworks_python
from benchmarks._program import options, quick, status
from benchmarks._table import print_table
from benchmarks.trial_loop import HEADINGS, SCRIPT, blocks, judged

BOUND = 0.95


def main() -> int:
    """Print the table; the number of bounds that are not met."""
    options(__doc__).parse_args()
    title = (
        f"steps per second of a DeepSpeedTrial on two ranks, of the bare loop's, {len(os.sched_getaffinity(0))} cores"
    )
    python = frameworks_python()
    if python is None:
        print_table(title, HEADINGS, [["ZeRO 1: not installed", *[None] * 7]])
        return 0
    env = {
        "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch_extensions"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    script = SCRIPT.with_name("_engine_trial.py")
    row, met = judged("ZeRO 1", BOUND, blocks(50, quick(80, 2), ranks=2, script=script, python=str(python), env=env))
    print_table(title, HEADINGS, [row])
    return not met


if __name__ == "__main__":
    raise SystemExit(status(main()))
