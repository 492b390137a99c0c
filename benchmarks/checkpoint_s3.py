"""Upload and download of a checkpoint on an S3 server, beside the peers, and what memory costs us.

The server is Ceph's gateway on this machine (moto where that is not installed: the title says so), which keeps objects
in memory, so that processors are all that is shared; source and target lie in memory, too. The gateway sends without
Nagle's delay, which is not its default: with the default every response in two pieces costs 40 ms, which would say
more about the server than about a client. Every contender runs in a process of its own with the settings it comes
with, into a prefix that is new and removed after each turn; they take turns in an order that rotates, and the best
round of each counts. Before each measurement a file of the same size is written and deleted, as the host of a virtual
machine takes free memory back, and gives it out again slower than anything that is measured here. We hash every file
on the way in and compare every byte on the way out.

Ours downloads with ``NoSharedDownload``, which is what the peers do; "shared download" is our default, which fetches
into the machine's cache, for other jobs to find, and copies from there: it writes everything twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks._peers import ROOT, peers_python
from benchmarks._program import QUICK, options, quick, status
from benchmarks._table import print_table
from benchmarks.checkpoint_directory import WARM, make_source, warm

sys.path.insert(0, str(ROOT / "tests"))
from support import rgw

FASTER, SMALL_FASTER, MEMORY = 0.9, 1.0, 256.0
LARGE, SMALL = quick(("8 x 128 MB", "5,000 x 4 KB"), ("2 x 2 MB", "50 x 4 KB"))
SHAPES = {LARGE: quick((8, 128 << 20), (2, 2 << 20)), SMALL: quick((5000, 4 << 10), (50, 4 << 10))}
OURS, DETERMINED = "det_core", "determined 0.38.1"
OURS_CACHED = "det_core, shared download"
TIMEOUT = 900.0
BUCKET = "benchmark"
Measured = dict[str, float]
"""Seconds ``up`` and ``down``, ``memory`` in MB, and ``work``: seconds of processor time of the upload."""
Contender = Callable[[Path, str, Path], Measured]
"""Copies a folder to a prefix of the bucket and from there to another folder."""

HEAD = (
    WARM
    + """
import json, os, re, sys, time
source, prefix, target = sys.argv[1:]
def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
size = sum(os.path.getsize(os.path.join(f, n)) for f, _, names in os.walk(source) for n in names)
def measured(up, down):
    warm(os.path.dirname(target), size)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    work = time.process_time()
    a = time.perf_counter()
    up()
    b = time.perf_counter()
    work = time.process_time() - work
    memory = status("VmHWM") - before
    warm(os.path.dirname(target), size)
    c = time.perf_counter()
    down()
    d = time.perf_counter()
    print(json.dumps({"up": b - a, "down": d - c, "memory": memory, "work": work}))
"""
)
SDK = """
with core.init(checkpoint_storage=storage{more}) as ctx:
    made = []
    measured(
        lambda: made.append(ctx.checkpoint.upload(source, {{"steps_completed": 1}})),
        lambda: ctx.checkpoint.download(made[0], target{mode}),
    )
"""
MANUAL = ", tensorboard_mode=core.TensorboardMode.MANUAL"
STRAIGHT = ", download_mode=core.DownloadMode.NoSharedDownload"
CODE = {
    OURS: """
from det_core import core
storage = {"type": "s3", "bucket": "benchmark", "prefix": prefix, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
"""
    + SDK.format(more=MANUAL, mode=STRAIGHT),
    DETERMINED: 'from determined import core\nstorage = "s3://benchmark/" + prefix\n' + SDK.format(more="", mode=""),
    "boto3 s3transfer": """
import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
s3 = boto3.client("s3")
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
measured(up, down)
""",
    "s3fs": """
import s3fs
fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
where = "benchmark/" + prefix
measured(
    lambda: fs.put(source + "/", where + "/", recursive=True),
    lambda: fs.get(where + "/", target + "/", recursive=True),
)
""",
}
CODE[OURS_CACHED] = CODE[OURS].replace(STRAIGHT, "")


def by_script(python: Path, code: str) -> Contender:
    """What measures a library, in a process of its own."""

    def measure(source: Path, prefix: str, target: Path) -> Measured:
        environment = {**os.environ, "DET_CORE_HOME": str(target.parent / "home")}
        command = [str(word) for word in (python, "-c", HEAD + code, source, prefix, target)]
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, env=environment)
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {done.stderr[-3000:].decode(errors='replace')}")
        found: Measured = json.loads(done.stdout.splitlines()[-1])
        return found

    return measure


def with_rclone(source: Path, prefix: str, target: Path) -> Measured:
    """rclone, a process for each direction (it starts in 0.1 s)."""
    remote = f"peer:{BUCKET}/{prefix}"
    environment = {
        **os.environ, "RCLONE_CONFIG": str(target.parent / "no-such-file"), "RCLONE_CONFIG_PEER_TYPE": "s3",
        "RCLONE_CONFIG_PEER_PROVIDER": "Ceph", "RCLONE_CONFIG_PEER_ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
        "RCLONE_CONFIG_PEER_ACCESS_KEY_ID": rgw.KEY, "RCLONE_CONFIG_PEER_SECRET_ACCESS_KEY": rgw.SECRET,
    }  # fmt: skip
    environment.pop("AWS_CA_BUNDLE", None)  # it knows none
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    warm(target.parent, size)
    a = time.perf_counter()
    subprocess.run(["rclone", "-q", "copy", source, remote], check=True, timeout=TIMEOUT, env=environment)
    b = time.perf_counter()
    warm(target.parent, size)
    c = time.perf_counter()
    subprocess.run(["rclone", "-q", "copy", remote, target], check=True, timeout=TIMEOUT, env=environment)
    return {"up": b - a, "down": time.perf_counter() - c, "memory": float("nan"), "work": float("nan")}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server with an empty bucket, to which the environment points; gives its name for the title."""
    from support.servers import serving_moto

    with contextlib.ExitStack() as stack:
        if reason := rgw.missing():
            print(reason, file=sys.stderr)
            url, name = stack.enter_context(serving_moto()), "moto (NOT a real server)"
        else:
            url, name = stack.enter_context(rgw.Gateway(objectstore="memstore")).url, "Ceph's gateway"
        os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID=rgw.KEY, AWS_SECRET_ACCESS_KEY=rgw.SECRET)
        os.environ.update(AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")
        with s3_client() as client:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="first", Body=b"pools are made by the first")
        yield name


@contextlib.contextmanager
def s3_client() -> Iterator[object]:
    """A client to prepare and to clean."""
    import boto3

    client = boto3.client("s3")
    try:
        yield client
    finally:
        client.close()


def clean(prefix: str) -> None:
    """Remove what lies under a prefix."""
    with s3_client() as client:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):  # type: ignore[attr-defined]
            keys = [{"Key": found["Key"]} for found in page.get("Contents", ())]
            if keys:
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys, "Quiet": True})  # type: ignore[attr-defined]


def measure(contenders: dict[str, Contender], folder: Path, shape: str, rounds: int) -> dict[str, Measured]:
    """The best seconds and the most memory of each."""
    count, size = SHAPES[shape]
    source = make_source(folder / "source", count, size)
    best: dict[str, Measured] = {}
    for number in range(rounds):
        order = [*contenders][number % len(contenders) :] + [*contenders][: number % len(contenders)]
        for name in order:
            prefix, target = f"{name.split()[0].strip(',')}-{number}", folder / "turn" / "down"
            target.mkdir(parents=True)
            found = contenders[name](source, prefix, target)
            check(source, target)
            (source / "metadata.json").unlink(missing_ok=True)  # determined writes it there
            shutil.rmtree(target.parent)
            clean(prefix)
            print(f"{shape}, round {number + 1}, {name}: {found}", file=sys.stderr, flush=True)
            before = best.get(name, found)
            best[name] = {key: (max if key == "memory" else min)(found[key], before[key]) for key in found}
    shutil.rmtree(source)
    return best


def check(source: Path, target: Path) -> None:
    """What came back must be what was sent."""
    sent = {path.relative_to(source): path.stat().st_size for path in source.rglob("*") if path.is_file()}
    come = {path.relative_to(target): path.stat().st_size for path in target.rglob("*") if path.is_file()}
    for found in (sent, come):
        found.pop(Path("metadata.json"), None)
    assert come == sent, f"{len(come)} files of {len(sent)} came back"


def main() -> int:
    """Print the tables; exit status 1 if a bound is not met."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=quick(5, 1))
    parser.add_argument("--only", help="part of the contenders' names, separated by commas, and 'large' or 'small'")
    arguments = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=memory))
    try:
        with server() as name:
            best = {
                shape: measure(chosen(arguments.only, shape), folder, shape, arguments.rounds)
                for shape in SHAPES
                if chosen(arguments.only, shape)
            }
    finally:
        shutil.rmtree(folder)
    return report(best, name, arguments.rounds)


def chosen(only: str | None, shape: str) -> dict[str, Contender]:
    """The contenders for a shape."""
    words = only.split(",") if only else []
    if {"large", "small"} & set(words) and ("large" if shape == LARGE else "small") not in words:
        return {}
    names = [word for word in words if word not in ("large", "small")]
    contenders: dict[str, Contender] = {}
    for name, code in CODE.items():
        if name == DETERMINED and QUICK:
            continue
        if not names or any(word in name for word in names):
            python = peers_python("determined==0.38.1") if name == DETERMINED else Path(sys.executable)
            contenders[name] = by_script(python, code)
    if shutil.which("rclone") and (not names or "rclone" in names):
        contenders["rclone"] = with_rclone
    return contenders


def report(best: dict[str, dict[str, Measured]], name: str, rounds: int) -> int:
    """Print what was found."""
    rows: list[list[object]] = []
    for shape, found in best.items():
        count, size = SHAPES[shape]
        peers = [peer for peer in found if not peer.startswith((OURS, DETERMINED, "rclone"))]
        for direction in ("up", "down"):
            against = peers if shape == LARGE else [peer for peer in found if peer == DETERMINED]
            base = min((found[peer][direction] for peer in against), default=float("nan"))
            for who, seconds in ((who, each[direction]) for who, each in found.items()):
                bound = FASTER if shape == LARGE else SMALL_FASTER
                met = base / seconds >= bound if who == OURS and against else None
                speed = count * size / 1e6 / seconds
                limit = bound if met is not None else None
                rows.append([f"{direction}load {shape}", who, seconds, speed, base / seconds, limit, met])
    title = (
        f"Checkpoints on {name}, best of {rounds}; times the fastest of s3fs and boto3 (small files: times determined)"
    )
    print_table(title, ["what", "by", "seconds", "MB/s", "times", ">=", "met"], rows)
    costs = costs_of(best.get(LARGE, {}))
    if costs:
        print_table("What it costs", ["what", "found", "<=", "met"], costs)
    return int(any(row[-1] is False for row in [*rows, *costs]))


def costs_of(found: dict[str, Measured]) -> list[list[object]]:
    """Rows for memory."""
    rows: list[list[object]] = []
    if OURS in found:
        memory = found[OURS]["memory"]
        rows.append([f"peak extra memory of the upload, MB, {LARGE}", memory, MEMORY, memory <= MEMORY])
    return rows


if __name__ == "__main__":
    raise SystemExit(status(main()))
