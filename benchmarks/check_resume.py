"""Cost of a check beside its trainings: `det-core check-resume` against the same seven starts of the script by hand.

By hand the script stops or kills itself at the steps that the check chooses; nothing is observed or compared.
"""

import resource
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._processes import environment
from benchmarks._turns import Figures, alternate, median, ratio

BOUND = 1.15
SCRIPT = """
import os, signal, sys
import torch
from det_core import core

length, disturb, at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(2048, 256)
labels = inputs.sum(1, keepdim=True).sign()
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters())
with core.init(name="bench", resume="latest") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            core.set_random_state(saved["random"])
    for step in range(ctx.steps_completed + 1, length + 1):
        rows = torch.randint(len(inputs), (256,))
        loss = torch.nn.functional.mse_loss(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.train.report_training_metrics(step, {"loss": loss.item()})
        if step == at and disturb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == at and disturb == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
        stop = ctx.preempt.should_preempt()
        if stop or step % (length // 8) == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": core.random_state()}
            ctx.checkpoint.save(state, {"steps_completed": step})
        if stop:
            break
"""


def options(parser: ArgumentParser) -> None:
    """Add the options of the training."""
    parser.add_argument("--steps", type=int, default=quick(2000, 24), metavar="N", help="of the training")


def measure(args: Args) -> Tables:
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        found = alternate({"by hand": lambda: by_hand(script, args.steps), "check": lambda: check(script, args.steps)},
                          args.rounds)  # fmt: skip
    table = Table(f"a training of {args.steps} steps, seven starts: seconds, medians of {args.rounds} pairs",
                  ["s", "times by hand", "CPU s", "CPU, times by hand"])  # fmt: skip
    times = ratio(found["check"], found["by hand"], "seconds")
    table.row("by hand", median(found["by hand"], "seconds"), None, median(found["by hand"], "cpu"))
    table.row("check-resume", median(found["check"], "seconds"), times, median(found["check"], "cpu"),
              ratio(found["check"], found["by hand"], "cpu"), bound=at_most(times, BOUND))  # fmt: skip
    yield table


def by_hand(script: Path, steps: int) -> Figures:
    """Start the script seven times, as a check does."""
    began = time.monotonic()
    used = cpu_seconds()
    stop_at = int(0.4 * steps)
    # Between the checkpoints at three and at four eighths, so that steps are lost and trained again.
    kill_at = int(0.44 * steps)
    for disturb, at, starts in (("no", 0, 2), ("no", 0, 1), ("stop", stop_at, 2), ("kill", kill_at, 2)):
        with tempfile.TemporaryDirectory(prefix="home-") as home:
            # In one home, as the second start resumes the newest run that it finds there.
            for start in range(starts):
                command = [sys.executable, str(script), str(steps), "no" if start else disturb, str(at)]
                done = subprocess.run(command, env=environment(Path(home)), stderr=subprocess.DEVNULL)
                assert done.returncode in (0, -signal.SIGKILL)
    return {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - used}


def check(script: Path, steps: int) -> Figures:
    """Check the script."""
    began = time.monotonic()
    used = cpu_seconds()
    command = [sys.executable, "-m", "det_core.cli", "check-resume", "--", sys.executable, str(script), str(steps)]
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        # The check's report goes to stderr: stdout is for the benchmark's tables.
        subprocess.run(
            [*command, "no", "0"], env=environment(Path(home)), check=True, stdout=2, stderr=subprocess.DEVNULL
        )
    return {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - used}


def cpu_seconds() -> float:
    """CPU time of the processes that were waited for, and of theirs: on a busy machine the fairer figure."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    program(measure, __doc__, rounds=3, more=options)
