"""Trainings whose DataLoader has workers, stopped in every way: what was saved, what is left, how long it took."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import warm
from support.processes import until

METHODS = ("fork", "spawn", "forkserver")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
DATA = """
import json, os, re, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from det_core import core

METHOD, FORM = sys.argv[1], os.environ.get("FORM", "")
WORKERS = 1 if FORM == "dies" else 2
STEPS, PACE = int(os.environ.get("STEPS", "2000")), 0.1 if FORM == "slow" else 0.002


class Data(Dataset):
    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 2 * (STEPS - self.first)

    def __getitem__(self, i):
        if FORM == "stuck" and i == 18 and get_worker_info():
            time.sleep(100_000)
        if FORM == "gil" and i == 18 and get_worker_info():
            re.match("(a+)+$", "a" * 60 + "b")
        if FORM == "dies" and i == 18 and get_worker_info():
            time.sleep(0.5)  # the training has come to wait for this batch
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PACE)
        return torch.tensor([(2 * self.first + i) / 1000])
"""
BARE = (
    DATA
    + """
def main():
    with core.init(name="workers", resume="latest", distributed=core.DistributedContext.detect()) as ctx:
        step, weight, ready_at = 0, 1.0, 3
        with ctx.checkpoint.resume() as path:
            if path:
                step, weight = json.loads((path / "state.json").read_text())
                ready_at = step + 3

        def save():
            if ctx.distributed.rank == 0:
                with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "state.json").write_text(json.dumps([step, weight]))
            print("SAVED", step, flush=True)

        batches = iter(DataLoader(Data(step), 2, num_workers=WORKERS, multiprocessing_context=METHOD))
        for batch in batches:
            step, weight = step + 1, weight * 0.999 + batch.double().mean().item()
            stop = ctx.preempt.should_preempt()
            if step == ready_at:
                print("READY", flush=True)
            if FORM in ("stuck", "gil") and step == 6:
                print("WAITING", flush=True)
                while not (stop := ctx.preempt.should_preempt()):
                    time.sleep(0.01)
            if stop:
                return save()
            if step % 20 == 0 and STEPS < 2000:
                save()
        print("END", weight.hex(), flush=True)


if __name__ == "__main__":
    main()
"""
)
ACCELERATED = (
    DATA
    + """
from det_core.accelerated import Trainer
from det_core.accelerated.callbacks import TrainerCallback


class Told(TrainerCallback):
    def on_update(self, trainer, **kwargs):
        if trainer.steps_completed == 3:
            print("READY", flush=True)


class Fit(Trainer):
    def calculate_train_batch_loss(self, batch):
        return {"loss": self.model(batch).square().mean(), "batch_size": len(batch)}


def main():
    with core.init(name="workers"):
        model = torch.nn.Linear(1, 1)
        trainer = Fit(model, None, torch.optim.SGD(model.parameters(), 0.01), callbacks=[Told])
        loader = {"num_workers": WORKERS, "multiprocessing_context": METHOD}
        trainer.train(Data(), 1, per_device_batch_size=2, train_dataloader_kwargs=loader)
        print("SAVED" if trainer.preempted else "END", flush=True)


if __name__ == "__main__":
    main()
"""
)
TRIAL = (
    DATA
    + """
from det_core import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.01))

    def build_training_data_loader(self):
        return pytorch.DataLoader(Data(), 2, num_workers=WORKERS, multiprocessing_context=METHOD)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Data(), 2)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if batch_idx == 3:
            print("READY", flush=True)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": 0.0}


def main():
    with core.init(name="workers") as ctx, pytorch.init(hparams={"global_batch_size": 2}, core_context=ctx) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Epoch(1))
        print("SAVED" if ctx.preempt.acknowledged else "END", flush=True)


if __name__ == "__main__":
    main()
"""
)
SCRIPTS = {"bare": BARE, "launcher": BARE, "accelerated": ACCELERATED, "trial": TRIAL}
LEFT_TIMEOUT = 30.0
"""Seconds after the end from which on a process counts as left."""
_MARK = "DET_CORE_TEST_STOPS"


@dataclass
class Stopped:
    """Outcome of a training.

    Attributes:
        saved: whether every rank has stopped in order, and a checkpoint is there.
        status: the exit status; None: it was still there after :data:`HANGS` and was killed.
        left: processes of it that outlived it.
        seconds: from the signal to the end.
    """

    saved: bool
    status: int | None
    left: list[int]
    seconds: float
    output: str

    @property
    def is_right(self) -> bool:
        """Whether nothing was lost, and nothing is left."""
        return self.saved and self.status == 0 and not self.left


class Training:
    """A training in a session of its own, with its home and its output in ``folder``.

    Args:
        kind: which of :data:`SCRIPTS`.
        method: the start method of its workers.
        folder: an empty one, or that of an earlier start.
        cold: start an interpreter, as a launcher always does, instead of forking from a process that has torch.
        variables: of its environment, beside this process's.
    """

    def __init__(self, kind: str, method: str, folder: Path, *, cold: bool = False, **variables: str) -> None:
        self.ranks = 2 if kind == "launcher" else 1
        self.folder = folder
        self._mark = f"{_MARK}={folder}"
        script = folder / "script.py"
        script.write_text(SCRIPTS[kind])
        environment = {**os.environ, **variables, "DET_CORE_HOME": str(folder / "home"), _MARK: str(folder)}
        self.process: warm.Started | subprocess.Popen[bytes]
        with (folder / "output").open("ab") as output:
            if cold or kind == "launcher":
                launcher = (
                    ["-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2"] if self.ranks > 1 else []
                )
                self.process = subprocess.Popen(
                    [sys.executable, *launcher, script, method], env=environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True, preexec_fn=_default_signals,
                )  # fmt: skip
            else:
                self.process = warm.start([script, method], env=environment, stdout=output.fileno(), session=True)

    def output(self) -> str:
        """Return the output so far."""
        return (self.folder / "output").read_text(errors="replace")

    def wait_for(self, word: str) -> None:
        """Wait until every rank has printed ``word``."""
        until(lambda: self.output().count(word) >= self.ranks, self.output, of=self.process)

    def wait_for_start(self, earlier: int) -> None:
        """Wait until one that goes on has trained, or has ended; ``earlier`` starts have printed to the same file."""
        until(lambda: self.output().count("READY") > earlier or self.process.poll() is not None, self.output)

    def processes(self) -> list[int]:
        """Return all of its processes that have not ended: of its session, or with its mark in their environment."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if state in "ZX":
                    continue
                # Ranks of a launcher lead sessions of their own; a warm process has its server's environment.
                if int(session) == self.process.pid or self._has_mark(pid):
                    found.append(pid)
        return found

    def _has_mark(self, pid: int) -> bool:
        return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    def send(self, number: int, *, to_each: bool) -> None:
        """Send a signal to the process group, or to every process as a scheduler does."""
        if not to_each:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(self.process.pid, number)
            return
        for pid in sorted(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, hangs: float = 300.0) -> Stopped:
        """Wait for its end; what is left of it is killed."""
        began = time.monotonic()
        try:
            status: int | None = self.process.wait(hangs)
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - began
        left: list[int] = []
        if status is not None:
            # A forkserver sees the end of others a moment later.
            while (left := self.processes()) and time.monotonic() - began - seconds < LEFT_TIMEOUT:
                time.sleep(0.02)
        self.kill()
        output = self.output()
        has_checkpoint = any(self.folder.glob("home/runs/*/checkpoints/*-*"))
        return Stopped(output.count("SAVED") >= self.ranks and has_checkpoint, status, left, seconds, output)

    def kill(self) -> None:
        """Kill all of it."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()


@contextlib.contextmanager
def training(kind: str, method: str, *, cold: bool = False, **variables: str) -> Iterator[Training]:
    """Yield a training in a directory of its own, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="workers-"))
    started = Training(kind, method, folder, cold=cold, **variables)
    try:
        yield started
    finally:
        started.kill()
        shutil.rmtree(folder, ignore_errors=True)


def stop(
    kind: str, method: str, number: int, *, to_each: bool, form: str = "", delay: float = 0.0, cold: bool = False
) -> Stopped:
    """Start a training, send it a signal ``delay`` seconds after its workers run, and wait for its end."""
    with training(kind, method, cold=cold, FORM=form) as started:
        started.wait_for("WAITING" if form in ("stuck", "gil") else "READY")
        time.sleep(delay)
        started.send(number, to_each=to_each)
        return started.end()


def _default_signals() -> None:
    # A shell that starts pytest in the background has SIGINT ignored, and that is inherited.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
