"""Upload and download of a checkpoint's files: on a directory, and on an S3 server.

We hash every byte on the way in, and compare every byte on the way out; no other contender does both. Before each
measurement a file of the same size is written and deleted, so that the page cache finds memory: the host of a virtual
machine takes free memory back, and gives it out again slower than anything that is measured here.

On a directory ``cp`` is the floor: ``cp -r`` and a sync of each file and folder for the upload, ``cp -r`` for the
download. The bound is on our speed beside another commit's (``--against``).

The S3 server is Ceph's gateway on this machine (moto where that is not installed: the title says so), without Nagle's
delay, which would say more about it than about a client. Source, target and objects lie in memory, so that processors
are all that is shared. Large files are compared with the faster of boto3 and s3fs, small ones with determined.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._bench import OURS, PEERS, Args, Table, Tables, at_least, program, quick
from benchmarks._processes import DETERMINED, ROOT, answer, peers, trees
from benchmarks._turns import Figures, alternate, median, ratio

sys.path.insert(0, str(ROOT / "tests"))
from support import rgw  # type: ignore[import-not-found]

BOTO3 = "boto3 s3transfer"
S3FS = "s3fs"
BUCKET = "benchmark"
SMALL = "5,000 x 4 KB", quick(5000, 50), 4 << 10
ON_DIRECTORY = ((("4 GB in 8 files", 8, quick(500_000_000, 2 << 20)), 0.9), (SMALL, 0.6))
"""Files, and how fast we must be beside the other commit."""
ON_S3 = ((("8 x 128 MB", quick(8, 2), quick(128, 2) << 20), (BOTO3, S3FS), 0.9), (SMALL, (DETERMINED,), 1.0))
"""Files, who is compared with, and how many times as fast we must be."""
HEAD = """
package, source, storage, target, size = sys.argv[1:]
def seconds(call):
    warm = os.path.join(os.path.dirname(target), "warm")
    with open(warm, "wb", buffering=0) as f:
        for _ in range(0, int(size), 1 << 17):
            f.write(bytes(1 << 17))
    os.sync()
    os.unlink(warm)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
def both(up, down):
    answer({"up": seconds(up), "down": seconds(down)})
"""
SDK = """
import importlib
core = importlib.import_module(package + ".core")
straight, made = {"download_mode": core.DownloadMode.NoSharedDownload}, []
with core.init(checkpoint_storage=json.loads(storage), tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
    both(lambda: made.append(ctx.checkpoint.upload(source, {"steps_completed": 1})),
         lambda: ctx.checkpoint.download(made[0], target, **straight))
"""
CP = """
import subprocess
def shell(line):
    subprocess.run(["sh", "-c", line, source, os.path.join(os.path.dirname(target), "up"), target], check=True)
both(lambda: shell('cp -r "$0" "$1" && find "$1" -print0 | xargs -0 sync'), lambda: shell('cp -r "$1" "$2"'))
"""
WITH_BOTO3 = """
import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
s3, prefix = boto3.client("s3"), json.loads(storage)["prefix"]
files = [os.path.relpath(os.path.join(f, n), source) for f, _, names in os.walk(source) for n in names]
def up():
    with create_transfer_manager(s3, TransferConfig()) as manager:
        done = [manager.upload(os.path.join(source, f), "benchmark", prefix + "/" + f) for f in files]
        [each.result() for each in done]
def down():
    for folder in {os.path.dirname(f) for f in files}:
        os.makedirs(os.path.join(target, folder), exist_ok=True)
    with create_transfer_manager(s3, TransferConfig()) as manager:
        done = [manager.download("benchmark", prefix + "/" + f, os.path.join(target, f)) for f in files]
        [each.result() for each in done]
both(up, down)
"""
WITH_S3FS = """
import s3fs
fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
where = "benchmark/" + json.loads(storage)["prefix"] + "/"
both(lambda: fs.put(source + "/", where, recursive=True), lambda: fs.get(where, target + "/", recursive=True))
"""
KEYS = {"AWS_ACCESS_KEY_ID": rgw.KEY, "AWS_SECRET_ACCESS_KEY": rgw.SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
Shape = tuple[str, int, int]
"""Name, number of files, bytes of each."""


def measure(args: Args) -> Tables:
    columns = ["seconds", "MB/s", "ours is times as fast"]
    table = Table(f"checkpoints on a directory, medians of {args.rounds}", columns)
    for shape, bound in ON_DIRECTORY:
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=args.folder) as folder:
            found = turns(args, Path(folder), shape, {"cp -r": CP})
        rows(table, shape, found, [name for name in found if name.startswith(f"{OURS} at")], bound)
    yield table
    if os.access("/dev/shm", os.W_OK):
        memory = "/dev/shm"
    else:
        memory = None
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=memory) as folder, server() as (name, url):
        table = Table(f"checkpoints on {name}, medians of {args.rounds}", columns)
        for shape, rivals, bound in ON_S3:
            found = turns(args, Path(folder), shape, {BOTO3: WITH_BOTO3, S3FS: WITH_S3FS}, url)
            rows(table, shape, found, [name for name in rivals if name in found], bound)
    yield table


def rows(table: Table, shape: Shape, found: dict[str, list[Figures]], rivals: list[str], bound: float) -> None:
    """Add the rows of a shape; the bound is on our speed relative to the fastest rival's, if there is one."""
    for way in ("up", "down"):
        speeds = {name: ratio(each, found[OURS], way) for name, each in found.items()}
        for name, each in found.items():
            seconds = median(each, way)
            least = min((speeds[rival] for rival in rivals), default=None)
            cells = (seconds, shape[1] * shape[2] / 1e6 / seconds, speeds[name])
            table.row(f"{way}load {shape[0]}: {name}", *cells, bound=at_least(least, bound) if name == OURS else None)


def turns(args: Args, folder: Path, shape: Shape, others: dict[str, str], url: str = "") -> dict[str, list[Figures]]:
    """Return the seconds of each contender, each time in a new directory and a new storage.

    Small files are only deleted at the end: ext4 without a journal does not use an inode again for some minutes after
    it was deleted, and searches ever longer for another.
    """
    source = make_source(folder / "source", shape)
    numbers = iter(range(1 << 30))
    if url:
        env = {"AWS_ENDPOINT_URL": url, **KEYS}
    else:
        env = {}

    def turn(code: str, package: str, **options: Any) -> Figures:
        work = folder / str(next(numbers))
        work.mkdir()
        where: object = f"{work}/store"
        if url:
            where = {"type": "s3", "bucket": BUCKET, "prefix": work.name, "endpoint_url": url}
        words = (package, source, json.dumps(where), work / "down", shape[1] * shape[2])
        found: Figures = answer(HEAD + code, *words, env=env, **options)
        (source / "metadata.json").unlink(missing_ok=True)  # determined writes it there
        came = sum(path.stat().st_size for path in (work / "down").rglob("file-*"))
        assert came == shape[1] * shape[2], f"{came} bytes came back"
        if url:
            client(url).rm(f"{BUCKET}/{work.name}", recursive=True)
        if url or shape != SMALL:
            # Large ones at once: of all rounds together they would fill the disk, or the memory.
            shutil.rmtree(work)
        return found

    run = functools.partial(functools.partial, turn)
    contenders = {name: run(code, name) for name, code in others.items()}
    contenders |= {name: run(SDK, OURS, tree=tree) for name, tree in trees(args.against).items()}
    if PEERS:
        contenders[DETERMINED] = run(SDK, "determined", python=peers(DETERMINED))
    found = alternate(contenders, args.rounds)
    shutil.rmtree(source)
    return found


def make_source(folder: Path, shape: Shape) -> Path:
    """Files of random bytes, a hundred to a folder."""
    _, count, size = shape
    block = os.urandom(1 << 20)
    for i in range(count):
        path = folder / f"{i // 100:03}" / f"file-{i:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as f:
            for start in range(0, size, len(block)):
                f.write(i.to_bytes(8, "little") + block[8 : min(len(block), size - start)])
    return folder


@contextlib.contextmanager
def server() -> Iterator[tuple[str, str]]:
    """Run a server with an empty bucket; yield its name, for the title, and its URL."""
    from support.servers import serving_moto  # type: ignore[import-not-found]

    with contextlib.ExitStack() as stack:
        if reason := rgw.missing():
            print(reason, file=sys.stderr)
            name = "moto (NOT a real server)"
            url = stack.enter_context(serving_moto())
        else:
            name = "Ceph's gateway"
            url = stack.enter_context(rgw.Gateway(objectstore="memstore")).url
        client(url).mkdir(BUCKET)
        client(url).pipe(f"{BUCKET}/first/first", b"pools are made by the first")
        yield name, url


def client(url: str) -> Any:
    """Return a client to prepare and to clean up."""
    import s3fs

    # s3fs returns the same object for the same arguments, and lists from memory what others have changed since.
    return s3fs.S3FileSystem(key=rgw.KEY, secret=rgw.SECRET, endpoint_url=url, use_listings_cache=False)


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True, folder=True)
