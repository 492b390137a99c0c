"""Upload and download of a checkpoint on a directory, beside ``cp -r`` and determined.

``cp`` is the floor: for the upload ``cp -r`` and then a sync of each file and folder, since that is what a complete
checkpoint costs; for the download ``cp -r`` alone. We hash every byte on the way in, and compare every byte on the way
out. determined neither syncs nor hashes.

Every copy goes into a folder that is new. Small files are only deleted at the end: ext4 without a journal does not use
an inode again for some minutes after it was deleted, and searches ever longer for another. Before each measurement a
file of the same size is written and deleted, so that the page cache finds memory: the host of a virtual machine takes
free memory back after two seconds, and gives it out again slower than anything that is measured here. The contenders
take turns in an order that rotates, and the best round of each counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table

BOUND = 1.2
SHAPES = quick(
    {"8 x 128 MB": (8, 128 << 20), "5,000 x 4 KB": (5000, 4 << 10)},
    {"2 x 2 MB": (2, 2 << 20), "50 x 4 KB": (50, 4 << 10)},
)
BLOCK = 1 << 20
TIMEOUT = 600.0
Contender = Callable[[Path, Path, int], list[float]]
"""Copies a folder of so many bytes to and fro below another; returns the seconds of each."""
WARM = """
import os
def warm(folder, size):
    path = os.path.join(folder, "warm")
    with open(path, "wb", buffering=0) as f:
        for _ in range(0, size, 1 << 17):
            f.write(bytes(1 << 17))
    os.sync()
    os.unlink(path)
"""
SCRIPT = """
import json, os, sys, time
{prepare}
source, root, target, size = sys.argv[1:]
with {init} as ctx:
    warm(os.path.dirname(target), int(size))
    a = time.perf_counter()
    storage_id = ctx.checkpoint.upload(source, {{"steps_completed": 1}})
    b = time.perf_counter()
    warm(os.path.dirname(target), int(size))
    c = time.perf_counter()
    ctx.checkpoint.download(storage_id, target)
    d = time.perf_counter()
print(json.dumps([b - a, d - c]))
"""
OURS = SCRIPT.format(
    prepare=WARM + "from det_core import core",
    init="core.init(checkpoint_storage=root, tensorboard_mode=core.TensorboardMode.MANUAL)",
)
DETERMINED = SCRIPT.format(prepare=WARM + "from determined import core", init="core.init(checkpoint_storage=root)")


def make_source(folder: Path, count: int, size: int) -> Path:
    """``count`` files of ``size`` random bytes, a hundred to a folder."""
    block = os.urandom(BLOCK)
    for i in range(count):
        path = folder / f"{i // 100:03}" / f"file-{i:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            for start in range(0, size, len(block)):
                f.write(i.to_bytes(8, "little") + block[8 : min(len(block), size - start)])
    return folder


def warm(folder: Path, size: int) -> None:
    """As the scripts do it, in a process that ends."""
    code = f"{WARM}\nimport sys; warm(sys.argv[1], {size})"
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=TIMEOUT)


def with_cp(source: Path, work: Path, size: int) -> list[float]:
    """Seconds of ``cp -r`` with syncs, and of ``cp -r``."""
    warm(work, size)
    a = time.perf_counter()
    subprocess.run(["cp", "-r", source, work / "up"], check=True, timeout=TIMEOUT)
    found = subprocess.run(["find", work / "up", "-print0"], check=True, stdout=subprocess.PIPE, timeout=TIMEOUT)
    subprocess.run(["xargs", "-0", "sync"], check=True, input=found.stdout, timeout=TIMEOUT)
    b = time.perf_counter()
    warm(work, size)
    c = time.perf_counter()
    subprocess.run(["cp", "-r", work / "up", work / "down"], check=True, timeout=TIMEOUT)
    return [b - a, time.perf_counter() - c]


def by_script(python: Path, code: str) -> Contender:
    """What measures one of the SDKs, in a process of its own."""

    def measure(source: Path, work: Path, size: int) -> list[float]:
        environment = {**os.environ, "DET_CORE_HOME": str(work / "home")}
        command = [str(word) for word in (python, "-c", code, source, work / "store", work / "down", size)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT, env=environment
        )
        seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
        return seconds

    return measure


def main() -> int:
    """Print the table; exit status 1 if a bound is not met."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(9, 1))
    parser.add_argument("--folder", type=Path, help="where to copy to and fro; default: a temporary folder")
    arguments = parser.parse_args()
    contenders: dict[str, Contender] = {
        "cp -r (+ sync)": with_cp,
        "det_core": by_script(Path(sys.executable), OURS),
    }
    if not QUICK:
        contenders["determined 0.38.1"] = by_script(peers_python("determined==0.38.1"), DETERMINED)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    rows: list[list[object]] = []
    try:
        for shape, (count, size) in SHAPES.items():
            best = measure(contenders, folder / shape.replace(" ", ""), count, size, arguments.rounds)
            for i, direction in enumerate(("upload", "download")):
                floor = best["cp -r (+ sync)"][i]
                for name, seconds in best.items():
                    ratio = seconds[i] / floor
                    met = ratio <= BOUND if name == "det_core" else None
                    rows.append([f"{direction} {shape}", name, seconds[i], count * size / 1e6 / seconds[i], ratio, met])
    finally:
        shutil.rmtree(folder)
    title = f"Checkpoints on a directory, best of {arguments.rounds}; det_core with checksums and syncs"
    print_table(title, ["what", "by", "seconds", "MB/s", "times cp", f"<= {BOUND}"], rows)
    return int(any(row[-1] is False for row in rows))


def measure(
    contenders: dict[str, Contender], folder: Path, count: int, size: int, rounds: int
) -> dict[str, list[float]]:
    """The best seconds of each, for upload and download."""
    source = make_source(folder / "source", count, size)
    best = {name: [float("inf")] * 2 for name in contenders}
    for number in range(rounds):
        order = [*contenders][number % len(contenders) :] + [*contenders][: number % len(contenders)]
        for name in order:
            work = folder / f"{name.split()[0]}-{number}"
            work.mkdir()
            seconds = contenders[name](source, work, count * size)
            print(f"round {number + 1}, {name}: {seconds[0]:.3f} s, {seconds[1]:.3f} s", file=sys.stderr, flush=True)
            best[name] = [min(pair) for pair in zip(best[name], seconds, strict=True)]
            if size > BLOCK:
                shutil.rmtree(work)
    return best


if __name__ == "__main__":
    raise SystemExit(status(main()))
