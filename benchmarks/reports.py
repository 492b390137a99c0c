"""Cost of a report of ten floats, beside wandb offline, TensorBoard and mlflow.

Each reporter runs in processes of its own, with the setting that costs its caller least: mlflow logs asynchronously,
wandb is offline. Two tables: the time of one call on the caller's thread (ours also while
a checkpoint is saved in the background), and reports a second until closing has returned, when all are kept. Two more
are ours alone: a single report of very many keys, and reports of tensors beside those of their ``.item()``, on the CPU
and, where there is one, on a GPU.
"""

import functools
from collections.abc import Callable

import torch

from benchmarks._bench import OURS, PEERS, Args, Table, Tables, at_least, at_most, program, quick
from benchmarks._processes import TORCH, answer, ours, peers
from benchmarks._turns import Figures, alternate, median

MEDIAN_US = 3.5
P99_US = 15.0
CHEAPER = 5.0
RATE = 150_000
KEY_US = 5.0
"""Bounds: microseconds of a call, times cheaper than the cheapest peer, reports a second, microseconds a key."""
OVER_ITEMS = {"cpu": {1: 1.5, 10: 1.5}, "cuda": {1: 2.0, 10: 1.0, 100: 0.3}}
"""By device and number of tensors: a report of them over one of their items, at most."""
TENSOR_CALLS = quick(2_000, 20)
CALLS, MANY, KEYS = quick((20_000, 200_000, 100_000), (100, 100, 100))
SAVING = f"{OURS}, while a checkpoint is saved"
AUTO = f"{OURS}, TensorBoard AUTO"
# mlflow opens sqlite only with sqlalchemy and alembic, and refuses its store of files (maintenance mode).
REQUIREMENTS = (TORCH, "numpy", "wandb", "tensorboard", "mlflow-skinny", "sqlalchemy", "alembic")
RIVALS = ("wandb", "tensorboard", "mlflow")

HEAD = """
metrics = {f'metric_{i}': i * 0.1234567 for i in range(10)}
def begin(step): pass
def counts(step): return True
"""
PLAIN = """
from det_core import core
context = core.init(tensorboard_mode=core.TensorboardMode.MANUAL)
context.__enter__()
train = context.train
def report(step):
    train.report_training_metrics(step, metrics)
def close():
    context.__exit__(None, None, None)
"""
REPORTERS = {
    AUTO: PLAIN.replace("MANUAL", "AUTO"),
    SAVING: PLAIN + """
import torch
from det_core.errors import CheckpointBusy
state = {"weights": torch.zeros(64_000_000)}  # 256 MB, which takes longer than a round
def begin(step):
    context.checkpoint.save(state, {"steps_completed": step}, blocking=False)
def counts(step):  # a round counts if the checkpoint was not saved before it was over
    try:
        context.checkpoint.begin({"steps_completed": step}, if_busy="raise").abort()
    except CheckpointBusy:
        return True
    return False
""",
    "wandb": """
import wandb
run = wandb.init(project="bench", mode="offline", settings=wandb.Settings(silent=True))
def report(step):
    run.log(metrics, step=step)
close = run.finish
""",
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("events")
def report(step):
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
close = writer.close
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
run = mlflow.start_run()
def report(step):
    mlflow.log_metrics(metrics, step=step, synchronous=False)
def close():
    mlflow.flush_async_logging()
    mlflow.end_run()
""",
}  # fmt: skip
COST = """
reports, clock, found, step = int(sys.argv[1]), time.perf_counter_ns, [], 0
for _ in range(5):
    begin(step)
    took = []
    for step in range(step + 1, step + reports + 1):
        start = clock()
        report(step)
        took.append(clock() - start)
    took.sort()
    if counts(step):
        found.append((took[reports // 2] / 1e3, took[reports * 99 // 100] / 1e3))
    time.sleep(0.2)
close()
answer(dict(zip(("median", "p99"), map(min, zip(*found)))))
"""
THROUGHPUT = """
reports, start = int(sys.argv[1]), time.perf_counter()
for step in range(1, reports + 1):
    report(step)
close()
answer({"reports/s": reports / (time.perf_counter() - start)})
"""
WIDE = """
keys, found = int(sys.argv[1]), []
for step, value in enumerate((0.5, 1), 1):  # the keys are new, and then known
    values = {f"key{i}": value for i in range(keys)}
    start = time.perf_counter_ns()
    train.report_metrics("wide", step, values)
    found.append((time.perf_counter_ns() - start) / 1e3 / keys)
close()
answer({"µs a key": max(found)})
"""
TENSORS = """
import statistics, torch
device, count, reports, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 0
torch.set_num_threads(1)
values = {f"key{i}": torch.full((), i / 7, device=device) for i in range(count)}
kinds = {"tensors": lambda: values, "items": lambda: {key: value.item() for key, value in values.items()}}
took = {kind: [] for kind in kinds}
work = torch.rand(256, 256, device=device)
for _ in range(reports + 10):
    for kind, metrics in kinds.items():
        work = torch.tanh(work @ work)  # a step of a training, which leaves no cache warm
        if device == "cuda":
            torch.cuda.synchronize()  # else an item would wait for the step as well
        step += 1
        start = time.perf_counter_ns()
        train.report_training_metrics(step, metrics())
        took[kind].append((time.perf_counter_ns() - start) / 1e3)
close()
tensors, items = (statistics.median(took[kind][10:]) for kind in kinds)
answer({"tensors": tensors, "their items": items, "ratio": tensors / items})
"""


def measure(args: Args) -> Tables:
    title = f"one report of ten floats on the caller's thread, µs, medians of {args.rounds} processes"
    table = Table(title, ["median", "p99"])
    found = turns(args, COST, CALLS, SAVING, rivals=500)
    for name, each in found.items():
        middle = median(each, "median")
        p99 = median(each, "p99")
        if name in (OURS, SAVING):
            bound = at_most(middle, MEDIAN_US) & at_most(p99, P99_US)
        else:
            bound = None
        table.row(name, middle, p99, bound=bound)
    if PEERS:
        cheaper = min(median(found[name], "median") for name in RIVALS) / median(found[OURS], "median")
        table.row("the cheapest peer : det_core", cheaper, bound=at_least(cheaper, CHEAPER))
    yield table
    title = f"reports of ten floats a second until closing has returned, medians of {args.rounds} processes"
    table = Table(title, ["reports/s"])
    table.fill(turns(args, THROUGHPUT, MANY, AUTO, rivals=5_000), lambda rate: at_least(rate, RATE))
    yield table
    table = Table(f"one report of {KEYS:,} keys, the slower of the first and the next", ["µs a key"])
    table.fill(turns(args, WIDE, KEYS), lambda us: at_most(us, KEY_US))
    yield table
    title = f"one report of tensors of one number each, µs, medians of {args.rounds} processes"
    table = Table(title, ["tensors", "their items", "ratio"])
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for count, most in OVER_ITEMS[device].items():
            found = alternate(ours(args, HEAD + PLAIN + TENSORS, device, count, TENSOR_CALLS), args.rounds)
            table.fill(found, lambda *figures, most=most: at_most(figures[-1], most), f"{count} on {device}, ")
    yield table


def turns(args: Args, loop: str, reports: int, *more: str, rivals: int = 0) -> dict[str, list[Figures]]:
    """Return the results of some reports of each tree, of ``more`` reporters of ours, and of the peers."""
    contenders = ours(args, HEAD + PLAIN + loop, reports)
    contenders |= {name: functools.partial(answer, HEAD + REPORTERS[name] + loop, reports) for name in more}
    theirs: dict[str, Callable[[], Figures]] = {}
    if rivals and PEERS:
        python = peers(*REQUIREMENTS)
        # GitPython, where git is missing, fails at its import unless it is to be quiet.
        env = {"WANDB_DIR": ".", "HF_HUB_OFFLINE": "1", "GIT_PYTHON_REFRESH": "quiet"}
        for name in RIVALS:  # those that queue would block with more
            if name == "mlflow":
                count = min(rivals, 1_000)
            else:
                count = rivals
            theirs[name] = functools.partial(answer, HEAD + REPORTERS[name] + loop, count, python=python, env=env)
    return alternate(contenders, args.rounds) | alternate(theirs, min(args.rounds, 3))  # they are slow, and far away


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True)
