"""How long committing a checkpoint of 1 GB keeps the training thread, when it is saved in the background.

The checkpoint's 8 files are written before the clock starts, as they are by a script that saves into ``store_path``.
Then the clock runs until the call returns that hands them over: the end of the ``store_path`` block,
``upload(consume=True)`` and ``upload()``, all with ``blocking=False``. While it is being saved the thread counts, and
the longest pause between two counts is in a column of its own. ``cp -r`` is one local copy. Beside:
``torch.distributed.checkpoint.async_save`` of 1 GB of tensors, which returns when it has copied them in memory, and
determined, whose ``upload`` returns when all is done. Best of some rounds, in turn. Before each a larger file is
written and deleted, as the host of a virtual machine must provide memory first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table
from benchmarks.checkpoint_directory import warm

FILES, SIZE = 8, quick(128, 1) << 20
AT_ONCE = 0.05
"""Seconds that a call may take which copies nothing."""
COPY = 1.2
"""Times ``cp`` that a call may take which copies."""
TIMEOUT = 600.0
PREPARE = f"""
import json, os, sys, time
FILES, SIZE = {FILES}, {SIZE}
""" + """
work, way = sys.argv[1:]
source, root = os.path.join(work, "source"), os.path.join(work, "store")
def fill(folder):
    os.makedirs(folder, exist_ok=True)
    for i in range(FILES):
        with open(os.path.join(folder, f"{i}.bin"), "wb") as f:
            for n in range(SIZE >> 20):
                f.write(((i * 4096 + n).to_bytes(8, "little")) * (1 << 17))
def count(until):
    longest, last = 0.0, time.perf_counter()
    while not until():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest
"""  # fmt: skip
OURS = """
from det_core import core
with core.init(checkpoint_storage=root, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    ctx.checkpoint.begin({"steps_completed": 0}).commit(blocking=False)  # what is imported once
    save = ctx.checkpoint.begin({"steps_completed": 1}, if_busy="wait")
    if way == "store_path":
        fill(str(save.path))
        a = time.perf_counter()
        save.commit(blocking=False)
        storage_id = save.storage_id
    else:
        save.abort()
        fill(source)
        a = time.perf_counter()
        storage_id = ctx.checkpoint.upload(source, {"steps_completed": 1}, blocking=False, consume=way == "consume")
    b = time.perf_counter()
    pause = count(lambda: os.path.exists(os.path.join(root, storage_id)))
    c = time.perf_counter()
print(json.dumps([b - a, pause, c - a]))
"""
DETERMINED = """
from determined import core
with core.init(checkpoint_storage=root) as ctx:
    fill(source)
    a = time.perf_counter()
    ctx.checkpoint.upload(source, {"steps_completed": 1})
    b = time.perf_counter()
print(json.dumps([b - a, None, b - a]))
"""
ASYNC_SAVE = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=0, world_size=1)
state = {str(i): torch.randint(0, 255, (SIZE,), dtype=torch.uint8) for i in range(FILES)}
dcp.async_save({"x": torch.zeros(1)}, checkpoint_id=os.path.join(work, "first")).result()
a = time.perf_counter()
future = dcp.async_save(state, checkpoint_id=root)
b = time.perf_counter()
pause = count(future.done)
future.result()
c = time.perf_counter()
dist.destroy_process_group()
print(json.dumps([b - a, pause, c - a]))
"""


def with_cp(work: Path) -> list[float | None]:
    """Seconds of one local copy."""
    fill = f"{PREPARE}\nfill(source)"
    subprocess.run([sys.executable, "-c", fill, str(work), ""], check=True, timeout=TIMEOUT)
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", work / "source", work / "copy"], check=True, timeout=TIMEOUT)
    seconds = time.perf_counter() - begin
    return [seconds, None, seconds]


def by_script(python: Path, code: str, way: str, work: Path) -> list[float | None]:
    """Seconds until the call returned, of the longest pause after that, and until all was saved."""
    environment = {**os.environ, "DET_CORE_HOME": str(work / "home")}
    command = [str(python), "-c", PREPARE + code, str(work), way]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT, env=environment
    )
    found: list[float | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print the table; exit status 1 if a bound is not met."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(5, 1))
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    arguments = parser.parse_args()
    ours = Path(sys.executable)
    contenders: dict[str, tuple[Path, str, str] | None] = {
        "cp -r": None,
        "det_core store_path": (ours, OURS, "store_path"),
        "det_core upload(consume=True)": (ours, OURS, "consume"),
        "det_core upload": (ours, OURS, "upload"),
    }
    if not QUICK:
        peers = peers_python("torch==2.13.0", "numpy", "determined==0.38.1")
        contenders["torch async_save"] = (peers, ASYNC_SAVE, "")
        contenders["determined 0.38.1 upload"] = (peers, DETERMINED, "")
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    best: dict[str, list[float | None]] = {}
    try:
        for number in range(arguments.rounds):
            for name, how in contenders.items():
                work = folder / f"{number}"
                work.mkdir()
                warm(work, 3 * FILES * SIZE)
                found = with_cp(work) if how is None else by_script(*how, work)
                print(f"round {number + 1}, {name}: {found[0]:.4f} s", file=sys.stderr, flush=True)
                if name not in best or found < best[name]:  # type: ignore[operator]
                    best[name] = found
                shutil.rmtree(work)
                os.sync()
    finally:
        shutil.rmtree(folder)
    return report(best, arguments.rounds)


def report(best: dict[str, list[float | None]], rounds: int) -> int:
    """Print it; 1 if a bound is not met."""
    copy = best["cp -r"][0] or 0.0
    bounds = {"det_core store_path": AT_ONCE, "det_core upload(consume=True)": AT_ONCE, "det_core upload": COPY * copy}
    rows: list[list[object]] = []
    for name, (stall, pause, all_saved) in best.items():
        assert stall is not None and all_saved is not None
        bound = bounds.get(name)
        rows.append(
            [name, stall * 1e3, stall / copy, None if pause is None else pause * 1e3, all_saved,
             None if bound is None else bound * 1e3, None if bound is None else stall <= bound]
        )  # fmt: skip
    columns = ["by", "stall ms", "times cp", "longest pause after ms", "saved after s", "bound ms", "met"]
    print_table(f"Committing {FILES} files of {SIZE >> 20} MiB on a directory, best of {rounds}", columns, rows)
    return int(any(row[-1] is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(status(main()))
