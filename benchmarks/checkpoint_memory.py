"""How much memory storing and fetching a checkpoint takes beside what the process has: peak resident set, in MB.

A checkpoint of 8 large files, and one of 20,000 small ones, in a process of its own each. The kernel's high-water mark
is reset before the call (``/proc/self/clear_refs``), and read after it; a checkpoint that is saved in the background
counts until it is saved. ``--storage`` names another store than a directory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._peers import peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table
from benchmarks.checkpoint_directory import make_source

BOUND = 256.0
"""MB."""
TIMEOUT = 1800.0
CALLS = ("upload", "upload in the background", "store_path in the background", "download")
MEMORY = """
import json, os, re, shutil, sys
source, root, target, call = sys.argv[1:]
def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024
def extra(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / 1e6
"""
OURS = """
from det_core import core
metadata = {"steps_completed": 1}
with core.init(checkpoint_storage=root, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    def background():
        ctx.checkpoint.upload(source, metadata, blocking=False)
        ctx.checkpoint.begin(metadata).abort()
    if call == "download":
        storage_id = ctx.checkpoint.upload(source, metadata)
        found = extra(lambda: ctx.checkpoint.download(storage_id, target))
    elif call == "upload":
        found = extra(lambda: ctx.checkpoint.upload(source, metadata))
    elif call == "upload in the background":
        found = extra(background)
    else:
        handle = ctx.checkpoint.begin(metadata)
        shutil.copytree(source, handle.path, dirs_exist_ok=True)
        def commit():
            handle.commit(blocking=False)
            handle.wait()
        found = extra(commit)
print(json.dumps(found))
"""
DETERMINED = """
from determined import core
with core.init(checkpoint_storage=root) as ctx:
    found = extra(lambda: ctx.checkpoint.upload(source, {"steps_completed": 1}))
print(json.dumps(found))
"""


def measure(python: Path, code: str, source: Path, work: Path, storage: str | None, call: str) -> float:
    """MB beyond what the process had."""
    work.mkdir()
    command = [str(python), "-c", MEMORY + code, str(source), storage or str(work / "store"), str(work / "down"), call]
    environment = {**os.environ, "DET_CORE_HOME": str(work / "home")}
    try:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT, env=environment
        )
    finally:
        shutil.rmtree(work)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Print the table; exit status 1 if the bound is not met."""
    parser = options(__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=quick(4.0, 0.02), help="size of the checkpoint of large files"
    )
    parser.add_argument("--files", type=int, default=quick(20_000, 100), help="number of small files")
    parser.add_argument("--storage", help="checkpoint_storage to measure on; default: a directory")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    shapes = {
        f"{arguments.gigabytes:g} GB in 8 files": (8, int(arguments.gigabytes * 1e9) // 8),
        f"{arguments.files:,} x 4 KB": (arguments.files, 4096),
    }
    rows: list[list[object]] = []
    try:
        for shape, (count, size) in shapes.items():
            source = make_source(folder / f"source-{count}", count, size)
            for call in CALLS:
                found = measure(Path(sys.executable), OURS, source, folder / "work", arguments.storage, call)
                rows.append([f"{call}, {shape}", "det_core", found, found <= BOUND])
                print(f"{rows[-1]}", file=sys.stderr, flush=True)
            if arguments.storage is None and not QUICK:
                peer = peers_python("determined==0.38.1")
                found = measure(peer, DETERMINED, source, folder / "work", None, "upload")
                rows.append([f"upload, {shape}", "determined 0.38.1", found, None])
            shutil.rmtree(source)
    finally:
        shutil.rmtree(folder)
    where = arguments.storage or "a directory"
    print_table(f"Memory beside what the process has, on {where}", ["call", "by", "MB", f"<= {BOUND:g}"], rows)
    return int(any(row[-1] is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(status(main()))
