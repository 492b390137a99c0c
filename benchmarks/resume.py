"""Cost of a resume in the middle of an epoch with ``core.resumable()``, beside loading the same batches.

Each round is a process of its own: it loads the batches by the DataLoader alone, by the resumable one, goes through
them as a resume does, and skips them. Times begin where the iterator is made and end with the last of the batches;
where they are skipped, once the next batch can be asked for.
"""

import statistics

from benchmarks._bench import OURS, Args, Bound, Table, Tables, at_most, program, quick
from benchmarks._processes import ours
from benchmarks._turns import alternate

BATCHES = quick(1000, 10)
THROUGH = 1.05
SKIPPED = 0.02
"""Bounds: times of what loading takes."""
CODE = """
from itertools import islice
import torch
from torch.utils.data import DataLoader
from det_core import core
batches, workers = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
class Images(torch.utils.data.Dataset):
    def __len__(self): return 32 * (batches + 10)
    def __getitem__(self, index):
        image = torch.rand(3, 64, 64)
        return image.flip(2) if torch.rand(()) < 0.5 else image
def loader(): return DataLoader(Images(), 32, shuffle=True, num_workers=workers)
def seconds(iterable, count):
    start = time.perf_counter()
    iterator = iter(iterable)
    for _ in range(count):
        next(iterator)
    return time.perf_counter() - start
def resumed(**options):
    made = core.resumable(loader(), **options)
    made.load_state_dict(state)
    return made
seconds(loader(), 10)
made = core.resumable(loader())
took = {"loaded by it": seconds(made, batches)}
state = made.state_dict()
took["loaded"] = seconds(loader(), batches)
took["gone through"] = seconds(resumed(), 0)
took["skipped"] = seconds(resumed(skip_loading=True), 0)
answer(took)
"""


def measure(args: Args) -> Tables:
    title = f"{BATCHES:,} done batches of 32 images, times of loading them, median of {args.rounds} processes"
    table = Table(title, ["loaded by it", "gone through", "skipped"])
    for workers in (0, 2):
        for name, found in alternate(ours(args, CODE, BATCHES, workers), args.rounds).items():
            # Within a process: the load of the machine changes from one to the next.
            times = [statistics.median(each[column] / each["loaded"] for each in found) for column in table.columns]
            bound = Bound("", None)
            if name == OURS:
                bound = at_most(times[0], THROUGH) & at_most(times[1], THROUGH) & at_most(times[2], SKIPPED)
            table.row(f"{workers} workers: {name}", *times, bound=bound)
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=9, against=True)
