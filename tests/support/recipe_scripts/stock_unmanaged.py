"""A script that no master starts, with the contract's own client (§9).

Usage: stock_unmanaged.py LENGTH NAME
"""

from __future__ import annotations

import sys

import determined as det
from determined.experimental import core_v2


def main(length: int) -> None:
    """Go on from the latest checkpoint, if there is one."""
    step = 0
    if core_v2.info.latest_checkpoint is not None:
        with core_v2.checkpoint.restore_path(core_v2.info.latest_checkpoint) as path:
            step = int((path / "steps").read_text())
    print(f"begins at {step}", flush=True)
    while step < length:
        step += 1
        core_v2.train.report_training_metrics(steps_completed=step, metrics={"loss": 1 / step})
    core_v2.train.report_validation_metrics(steps_completed=step, metrics={"loss": 1 / step})
    with core_v2.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "steps").write_text(str(step))


if __name__ == "__main__":
    given = core_v2.Config(
        name="stock unmanaged", hparams={"lr": 0.5}, external_experiment_id=sys.argv[2], external_trial_id="T1"
    )
    core_v2.init(config=given, tensorboard_mode=det.core.TensorboardMode.MANUAL)
    main(int(sys.argv[1]))
    core_v2.close()
