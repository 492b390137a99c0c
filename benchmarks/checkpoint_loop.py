"""What checkpoints cost a training loop: the quickstart saving every 20 steps in the background, against not at all.

One process trains the quickstart's model in stretches of 100 steps, in turn without checkpoints and with one every 20
steps: ``save(trainer.state(), ..., blocking=False)``. Which comes first changes from pair to pair, as the machine may
be slower at one time than at another; of the ratios within the pairs the median is taken, and the interval in which it
lies with 95 % probability. What is imported or started once is not in it; a row of its own tells what the first
checkpoint costs. Rows without a bound, of a quarter of the pairs, tell what ``torch.save`` costs in the loop: alone,
into a new file, with nothing of ours around it, and in the block of ``store_path(..., blocking=False)``.
Three times: as the quickstart's README runs it, on two ranks under torchrun; as one process with one processor left to
the background; and as one process with torch's threads on all processors, where those that wait for work spin, so that
whatever else runs takes time from them. ``--blocking`` measures ``blocking=True``, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

BOUND = 1.03
EVERY = 20
SAVES = 5
"""In a stretch, at equal distances from its beginning on: the last one is done before the stretch is."""
WARM_UP = quick(5, 1)
TIMEOUT = 1800.0
BOUNDED = "save(blocking=False)"
IN_LOOP = "torch.save in store_path(blocking=False)"
WAYS = (BOUNDED, IN_LOOP, "torch.save alone")
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"


class Loop:
    """The quickstart's training loop, a stretch of steps at a time."""

    def __init__(self, ctx: Any, beside: Path) -> None:
        self.beside = beside
        sys.path.insert(0, str(QUICKSTART))
        import train  # type: ignore[import-not-found]

        args = SimpleNamespace(batch_size=32, lr=1e-3, width=32, seed=1, load=None, save=None)
        self.ctx = ctx
        self.trainer = train.Trainer(args, ctx)
        self.chief = ctx.distributed.rank == 0
        self.cross_entropy = train.cross_entropy
        self.step = 0
        self.batches = iter(())  # type: ignore[var-annotated]

    def stretch(self, way: str) -> float:
        """Seconds that a stretch takes."""
        begin = time.perf_counter()
        for _ in range(SAVES):
            if self.chief and way != "none":
                self.save(way)
            for _ in range(EVERY):
                self.train()
        return time.perf_counter() - begin

    def save(self, way: str) -> None:
        """One checkpoint, or what stands for it."""
        if way == "torch.save alone":
            self.trainer.save(self.beside / f"{self.step}.pt")
            return
        metadata = {"steps_completed": self.step}
        if way == BOUNDED:
            self.ctx.checkpoint.save(self.trainer.state(), metadata, blocking=False)
            return
        with self.ctx.checkpoint.store_path(metadata, blocking=way == "blocking") as (path, _):
            self.trainer.save(path / "state.pt")

    def train(self) -> None:
        """One step, as in the quickstart."""
        trainer = self.trainer
        try:
            images, labels = next(self.batches)
        except StopIteration:
            self.batches = trainer.batches()
            images, labels = next(self.batches)
        loss = self.cross_entropy(trainer.network(images), labels)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        self.step += 1
        if self.chief:
            self.ctx.train.report_training_metrics(self.step, {"loss": loss.item()})
        self.ctx.preempt.should_preempt()


def measure(rounds: int, store: str, ways: tuple[str, ...]) -> dict[str, Any]:
    """The seconds of stretches in pairs, without checkpoints and with, by way; and those of the first checkpoint."""
    from det_core import core

    distributed = core.DistributedContext.detect()
    mode = core.TensorboardMode.MANUAL
    with core.init(distributed=distributed, checkpoint_storage=store, tensorboard_mode=mode) as ctx:
        beside = Path(store).with_name("beside")
        beside.mkdir(exist_ok=True)
        loop = Loop(ctx, beside)
        loop.stretch("none")
        begin = time.perf_counter()
        if loop.chief:
            loop.save(BOUNDED)
        first = time.perf_counter() - begin
        found: dict[str, list[tuple[float, float]]] = {}
        for way in ways:
            for _ in range(WARM_UP):
                loop.stretch(way)
            count = rounds if way == BOUNDED else -(-rounds // 4)
            found[way] = [pair(loop, way, first=number % 2 == 0) for number in range(count)]
    return {"pairs": found, "first": first}


def pair(loop: Loop, way: str, *, first: bool) -> tuple[float, float]:
    """The seconds of two stretches: without checkpoints, and with, which is the first of the two or the second."""
    if first:
        saving = loop.stretch(way)
        return loop.stretch("none"), saving
    return loop.stretch("none"), loop.stretch(way)


def in_child(ranks: int, threads: int, rounds: int, ways: tuple[str, ...], folder: Path) -> tuple[dict[str, Any], int]:
    """What :func:`measure` finds on so many ranks with so many threads each, and the bytes of a checkpoint."""
    work = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=folder))
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "det_core.launch.torch_distributed", "--nproc-per-node", str(ranks)]
    command += [__file__, "--child", str(work / "found"), "--folder", str(work / "store")]
    command += ["--rounds", str(rounds)] + ["--blocking"] * ("blocking" in ways) + ["--quick"] * QUICK
    environment = {**os.environ, "DET_CORE_HOME": str(work / "home"), "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    null = subprocess.DEVNULL
    subprocess.run(command, check=True, stdout=null, stderr=null, timeout=TIMEOUT, env=environment)
    found = json.loads((work / "found").read_text())
    return found, max(path.stat().st_size for path in (work / "store").rglob("state.pt"))


def rows_of(ranks: int, threads: int, found: dict[str, Any], ways: tuple[str, ...]) -> list[list[object]]:
    """The rows of the table for one number of ranks and threads."""
    rows: list[list[object]] = []
    for way in ways:
        pairs = found["pairs"][way]
        ratios = [saving / none for none, saving in pairs]
        ratio = statistics.median(ratios)
        each = statistics.median(saving - none for none, saving in pairs) / SAVES * 1e3
        step = statistics.median(none for none, _ in pairs) / SAVES / EVERY * 1e3
        met = ratio <= BOUND if way == BOUNDED else None
        rows.append([ranks, threads, way, len(pairs), step, each, f"{ratio:.4f}", interval(ratios), met])
    rows.append([ranks, threads, "first checkpoint ever", 1, None, found["first"] * 1e3, None, None, None])
    return rows


def interval(values: list[float]) -> str:
    """Where the median of what ``values`` are drawn from lies with 95 % probability, whatever their distribution.

    Between two order statistics: how many values are below the median is binomial, here by its normal approximation.
    """
    ordered, middle, half = sorted(values), len(values) / 2, 1.96 * math.sqrt(len(values)) / 2
    low, high = max(0, math.floor(middle - half)), min(len(values) - 1, math.ceil(middle + half))
    return f"{ordered[low]:.3f} to {ordered[high]:.3f}"


def main() -> int:
    """Print the table; exit status 1 if the bound is not met."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(150, 1), help="pairs of stretches; default: 150")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--blocking", action="store_true", help="also without the background")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ways = (*WAYS, "blocking") if arguments.blocking else WAYS
    if arguments.child:
        found = measure(arguments.rounds, str(arguments.folder), ways)
        if int(os.environ.get("RANK", 0)) == 0:
            arguments.child.write_text(json.dumps(found))
        return 0
    processors = len(os.sched_getaffinity(0))
    rows: list[list[object]] = []
    # Nothing is deleted before the end: ext4 without a journal is slow to make files for minutes after that.
    with tempfile.TemporaryDirectory(prefix="checkpoint_loop-", dir=arguments.folder) as folder:
        for ranks, threads in dict.fromkeys(((2, 1), (1, max(1, processors - 1)), (1, processors))):
            found, size = in_child(ranks, threads, arguments.rounds, ways, Path(folder))
            rows += rows_of(ranks, threads, found, ways)
    title = f"The quickstart on {processors} processors, a checkpoint of {size / 1e6:.1f} MB every {EVERY} steps"
    columns = ["ranks", "threads", "checkpoints", "pairs", "ms/step without", "ms each", "times none", "95 %"]
    print_table(title, [*columns, f"<= {BOUND}"], rows)
    return int(any(row[-1] is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(status(main()))
