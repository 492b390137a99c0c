"""Cost of a torch checkpoint to a training: in the call that saves it in the background, and in the loop.

In the call: a process saves some states one after the other, each when the one before is on disk, and the median
counts; the first call, which touches its memory for the first time, stands beside it. The others are ``blocking=True``,
``torch.save`` into a new file (nothing of ours) and torch's ``async_save``.

In the loop: the quickstart trains in stretches, in turn without checkpoints and with one every 20 steps; of the ratios
within the pairs the median is taken. On two ranks, as its README runs it; in one process that leaves a processor to the
background; and in one whose threads spin on all of them, so that whatever else runs takes time from the training.
What is imported or started once is in neither.
"""

import functools
import os
import tempfile

from benchmarks._bench import Args, Table, Tables, at_most, program, quick
from benchmarks._processes import ROOT, answer, ours
from benchmarks._turns import alternate, median, ratio

STATES = (("0.7 MB", 20, 8_750, 2.0), ("3 MB in 641 tensors", 641, 1_170, 10.0), ("100 MB", 20, 1_250_000, 25.0))
"""Name, number of tensors, floats of each, bound in milliseconds."""
OF_BLOCKING = 0.25
"""A bound: times blocking, for the largest state."""
SAVES = quick(10, 2)
STRETCHES, EVERY, IN_STRETCH = quick((150, 20, 5), (1, 4, 1))
CALL = """
import statistics, tempfile, torch
way, folder, tensors, size, saves = *sys.argv[1:3], *map(int, sys.argv[3:])
root = tempfile.mkdtemp(dir=folder)
state = {f"layer{i}": torch.rand(size) for i in range(tensors)}
def calls(save, saved):
    took = []
    for number in range(saves + 1):  # the first one starts what is started once
        began = time.perf_counter()
        handle = save(number)
        took.append(time.perf_counter() - began)
        saved(handle)
    answer({"ms": statistics.median(took[1:]) * 1e3, "first": took[0] * 1e3})
if way == "torch.save":
    calls(lambda number: torch.save(state, f"{root}/{number}.pt"), lambda _: None)
elif way == "torch async_save":
    import torch.distributed as dist, torch.distributed.checkpoint as dcp
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=0, world_size=1)
    calls(lambda number: dcp.async_save(state, checkpoint_id=f"{root}/{number}"), lambda future: future.result())
    dist.destroy_process_group()
else:
    from det_core import core
    with core.init(checkpoint_storage=root, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        save, blocking = ctx.checkpoint.save, way == "save(blocking=True)"
        calls(lambda number: save(state, {"steps_completed": number}, blocking=blocking),
              lambda _: ctx.checkpoint.begin({"steps_completed": 0}).abort())  # waits for the one before
"""
BOUNDED = "save(blocking=False)"
BLOCKING = "save(blocking=True)"
BESIDE = ("torch.save", "torch async_save")
CORES = len(os.sched_getaffinity(0))
QUICKSTART = ROOT / "examples" / "quickstart"
JOBS = tuple(dict.fromkeys(((2, 1), (1, max(1, CORES - 1)), (1, CORES))))  # ranks, and threads of each
LOOP = """
import statistics
folder, examples, stretches, every, in_stretch = *sys.argv[1:3], *map(int, sys.argv[3:])
root = os.path.join(folder, "loop-" + os.environ["BENCH_PORT"])  # the same for all ranks
sys.path.insert(0, examples)
from types import SimpleNamespace
import train
from det_core import core
args = SimpleNamespace(batch_size=32, lr=1e-3, width=32, seed=1, load=None, save=None)
mode, distributed = core.TensorboardMode.MANUAL, core.DistributedContext.detect()
with core.init(distributed=distributed, checkpoint_storage=root, tensorboard_mode=mode) as ctx:
    trainer, chief = train.Trainer(args, ctx), ctx.distributed.rank == 0
    def step():
        images, labels = next(batches)
        loss = train.cross_entropy(trainer.network(images), labels)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        trainer.step += 1
        if chief:
            ctx.train.report_training_metrics(trainer.step, {"loss": loss.item()})
        ctx.preempt.should_preempt()
    def stretch(save):
        began = time.perf_counter()
        for _ in range(in_stretch):
            if chief:
                save()
            for _ in range(every):
                step()
        return time.perf_counter() - began
    batches = (batch for _ in iter(int, 1) for batch in trainer.batches())
    ways = {
        "save(blocking=False)": lambda: ctx.checkpoint.save(
            trainer.state(), {"steps_completed": trainer.step}, blocking=False),
        "torch.save": lambda: trainer.save(f"{trainer.step}.pt"),
    }
    found = {}
    for way, save in ways.items():
        for _ in range(min(5, stretches)):  # what is imported and started once
            stretch(save)
        pairs = []
        for number in range(stretches):  # which is first changes, as the machine may be slower now and then
            order = (int, save) if number % 2 else (save, int)
            took = dict(zip(order, map(stretch, order)))
            pairs.append((took[int] / in_stretch / every * 1e3, (took[save] - took[int]) / in_stretch * 1e3,
                          took[save] / took[int]))
        found[way] = [statistics.median(each) for each in zip(*pairs)]
if chief:
    answer(found)
"""


def measure(args: Args) -> Tables:
    # Nothing is deleted before the end: ext4 without a journal is slow to make files for minutes after that.
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as folder:
        title = f"what saving a state takes in the call, ms, medians of {args.rounds} processes"
        table = Table(title, ["ms", "of blocking", "the first"])
        for what, tensors, size, most in quick(STATES, STATES[:1]):
            words = (folder, tensors, size, SAVES)
            if args.against:
                contenders = ours(args, CALL, BOUNDED, *words)
            else:
                contenders = {}
            for way in (BOUNDED, BLOCKING, *BESIDE):
                contenders[way] = functools.partial(answer, CALL, way, *words)
            found = alternate(contenders, args.rounds)
            for name, each in found.items():
                ms = median(each, "ms")
                times = ratio(each, found[BLOCKING], "ms")
                if name == BOUNDED:
                    bound = at_most(ms, most)
                else:
                    bound = None
                if bound and what == "100 MB":
                    bound = bound & at_most(times, OF_BLOCKING)
                table.row(f"{what}: {name}", ms, times, median(each, "first"), bound=bound)
        yield table
        columns = ["ms/step without", "ms each", "times none"]
        table = Table(f"the quickstart on {CORES} processors, {STRETCHES} pairs of stretches", columns)
        for ranks, threads in quick(JOBS, JOBS[:1]):
            launcher: tuple[str, ...] = ()
            if ranks > 1:
                launcher = ("-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2")
            env = {"OMP_NUM_THREADS": str(threads)}
            sizes = (STRETCHES, EVERY, IN_STRETCH)
            # One turn: the stretches with and without checkpoints alternate within it.
            for name, turn in ours(args, LOOP, folder, QUICKSTART, *sizes, launcher=launcher, env=env).items():
                for way, figures in turn().items():
                    table.row(f"{ranks} ranks of {threads} threads: {name}, {way}", *figures)
        yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True, folder=True)
