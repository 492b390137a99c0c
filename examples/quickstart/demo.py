"""Train ``train.py`` on two ranks, interrupt it halfway, resume it, and check that nothing is missing or double.

Run it with ``make demo``. What it records is kept in ``./demo-home``; each demo deletes what the last one kept.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from det_core import client

TRAIN = Path(__file__).resolve().parent / "train.py"
EPOCH = re.compile(r"epoch (\d+)/(\d+): ")
ACCURACY = 0.97
DEADLINE = 600.0
"""Seconds that one of the two trainings may take; they take about ten on two cores."""


class DemoError(Exception):
    """Something did not go as it must."""


def main() -> int:
    """Run the demo; 0 if all went as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--home", type=Path, default=Path("demo-home"), help="where runs are kept")
    args = parser.parse_args()
    home = args.home.absolute()
    for run in client.runs(home):
        if run.name == str(TRAIN):
            client.delete_run(run.run_id, home)
    try:
        half = max(2, args.epochs // 2)
        say(1, f"train {args.epochs} epochs on {args.ranks} ranks; SIGTERM after epoch {half}")
        train(args, home, interrupt_after=half)
        say(2, "resume from the checkpoint that the interrupted training left: DET_CORE_RESUME=latest")
        train(args, home, resume="latest")
        say(3, "what is recorded")
        show(client.run("latest", home), args)
    except DemoError as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def say(number: int, text: str) -> None:
    """Print the title of a step of the demo."""
    print(f"\n=== {number}. {text}", flush=True)


def train(args: argparse.Namespace, home: Path, interrupt_after: int | None = None, resume: str = "") -> None:
    """Run the launcher to its end, and pass on what it prints.

    Args:
        args: the demo's own.
        home: where runs are kept.
        interrupt_after: send the launcher one SIGTERM when the script has printed the line of this epoch.
        resume: the value of DET_CORE_RESUME.

    Raises:
        DemoError: the launcher's status is not 0, or it ended before it could be interrupted.
    """
    launcher = [sys.executable, "-m", "det_core.launch.torch_distributed"]
    command = [*launcher, "--nproc-per-node", str(args.ranks), str(TRAIN), "--epochs", str(args.epochs)]
    environment = {**os.environ, "DET_CORE_HOME": str(home), "DET_CORE_RESUME": resume}
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    # A training that hangs would block the loop below, which reads its output.
    watchdog = threading.Timer(DEADLINE, job.kill)
    watchdog.start()
    interrupted = False
    try:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            epoch = EPOCH.search(line)
            if not interrupted and epoch and int(epoch[1]) == interrupt_after:
                job.send_signal(signal.SIGTERM)
                interrupted = True
                print(f"(demo: SIGTERM sent to the launcher, pid {job.pid})", flush=True)
        status = job.wait()
    finally:
        watchdog.cancel()
        if job.poll() is None:
            job.terminate()
            job.wait()
    if status:
        raise DemoError(f"{' '.join(command)} ended with status {status}")
    if interrupted != (interrupt_after is not None):
        raise DemoError(f"the training ended before epoch {interrupt_after}")


def show(run: client.Run, args: argparse.Namespace) -> None:
    """Print the accuracy, the history and where everything is.

    Raises:
        DemoError: the history lacks a step or has one twice, or the accuracy is too low.
    """
    training = list(run.rows("training"))
    validation = list(run.rows("validation"))
    print("\n  epoch   step  start  training loss  accuracy")
    before = 0
    for epoch, row in enumerate(validation, 1):
        step = row.steps_completed or 0
        losses = [r.metrics["loss"] for r in training if before < (r.steps_completed or 0) <= step]
        loss = sum(losses) / max(1, len(losses))
        print(f"  {epoch:5}  {step:5}  {row.restart:5}  {loss:13.4f}  {row.metrics['accuracy']:8.4f}")
        before = step
    steps = [row.steps_completed for row in training]
    starts = sorted({row.restart for row in training})
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise DemoError(f"the training metrics are not of the steps 1, 2, 3, ... each once: {steps}")
    if len(validation) != args.epochs or before != len(steps):
        raise DemoError(f"there are {len(validation)} validations up to step {before}, of {len(steps)} steps")
    if len(starts) != 2 or run.state != "completed":
        raise DemoError(f"the run is {run.state} after {len(starts)} start(s) that trained, expected 2")
    accuracy = validation[-1].metrics["accuracy"]
    print(f"\n  validation accuracy  {accuracy:.4f}")
    print(f"  training history     {len(steps)} steps, each exactly once, from {len(starts)} starts")
    print_places(run)
    if accuracy < ACCURACY:
        raise DemoError(f"the validation accuracy is {accuracy:.4f}, expected {ACCURACY} or more")


def print_places(run: client.Run) -> None:
    """Print where the run and its checkpoints are, and what to type to see more."""
    checkpoints = run.checkpoints()
    print(f"  run                  {run.run_id}, {run.state}")
    print(f"  run folder           {run.path}")
    print(f"  checkpoints          {len(checkpoints)} in {run.path / 'checkpoints'}, the last three:")
    for checkpoint in checkpoints[-3:]:
        made = time.strftime("%H:%M:%S", time.localtime(checkpoint["time"]))
        steps = checkpoint["metadata"]["steps_completed"]
        print(f"    {checkpoint['storage_id']}  step {steps}, {made}")
    det_core = os.path.relpath(Path(sys.executable).parent / "det-core")
    print("\n  To look further:")
    print(f"    export DET_CORE_HOME={run.path.parent.parent}")
    print(f"    {det_core} runs show {run.run_id}")
    print(f"    {det_core} runs export {run.run_id} --format csv")
    if (run.path / "tensorboard").is_dir():
        tensorboard = os.path.relpath(Path(sys.executable).parent / "tensorboard")
        print(f"    {tensorboard} --logdir {run.path / 'tensorboard'}")


if __name__ == "__main__":
    raise SystemExit(main())
