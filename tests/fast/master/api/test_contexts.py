"""Context directories, and what of them is refused."""

from __future__ import annotations

import base64
import io
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

from support.running_master import CONFIG, Running


def entry(path: str, content: bytes = b"", kind: int = 48, **more: Any) -> dict[str, Any]:
    """Return a file as the contract's clients send it (§10)."""
    text = base64.b64encode(content).decode()
    return {
        "path": path,
        "type": kind,
        "content": text,
        "mtime": "1700000000",
        "mode": 0o644,
        "uid": 0,
        "gid": 0,
    } | more


def archive(**members: bytes) -> str:
    """Return a tar archive, gzipped, in base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, member in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(member)
            tar.addfile(info, io.BytesIO(member))
    return base64.b64encode(packed.getvalue()).decode()


def test_the_files_come_back_to_the_task(master: Running) -> None:
    files = [entry("sub", kind=53), entry("sub/train.py", b"print(1)\n"), entry("empty")]
    spec = master.a_trial(modelDefinition=files)
    told = master.ask("GET", f"tasks/{spec.task_id}/context_directory", token=spec.session_token).json["b64Tgz"]
    assert told == master.ask("GET", f"experiments/{spec.experiment_id}/model_def").json["b64Tgz"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(told))) as tar:
        train = tar.extractfile("sub/train.py")
        assert train is not None
        assert train.read() == b"print(1)\n"
        assert sorted(tar.getnames()) == ["empty", "sub", "sub/train.py"]
    assert spec.context is not None


def test_large_context_leaves_the_loop_to_other_requests(tmp_path: Path) -> None:
    """The guard of these tests fails if one callback keeps it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=0) as tar:
        member = tarfile.TarInfo("weights")
        member.size = 40 << 20
        tar.addfile(member, io.BytesIO(os.urandom(member.size)))
    running = Running(tmp_path, limit=128 << 20)
    try:
        spec = running.a_trial(b64Tgz=base64.b64encode(packed.getvalue()).decode())
        answer = running.ask("GET", f"tasks/{spec.task_id}/context_directory")
        assert base64.b64decode(answer.json["b64Tgz"]) == packed.getvalue()
    finally:
        running.close()


def test_without_files_there_is_none(master: Running) -> None:
    spec = master.a_trial(modelDefinition=[])
    assert master.ask("GET", f"tasks/{spec.task_id}/context_directory").json == {"b64Tgz": ""}


def test_what_would_lead_elsewhere_is_refused(master: Running) -> None:
    """The rules are those of ``engines._archive``, whose tests have them all."""
    before = len(master.ask("GET", "experiments").json["experiments"])
    for files in ([entry("a/../../out")], [entry("x") | {"content": "no base64!"}], [entry("x") | {"mtime": "soon"}]):
        refused = master.ask("POST", "experiments", {"config": CONFIG, "modelDefinition": files})
        assert refused.status == 400, refused.text
    for packed in (archive(**{"../out": b"x"}), base64.b64encode(b"no archive").decode(), "no base64!"):
        refused = master.ask("POST", "experiments", {"config": CONFIG, "b64Tgz": packed})
        assert refused.status == 400, refused.text
    assert len(master.ask("GET", "experiments").json["experiments"]) == before


def test_an_archive_that_grows_to_more_than_ten_gigabytes_is_refused(master: Running) -> None:
    """A header says that the file in it has 11 GB; that is enough to know."""
    info = tarfile.TarInfo("zeros")
    info.size = 11 << 30
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(info.tobuf()) + packer.compress(bytes(1 << 20)) + packer.flush()
    refused = master.ask("POST", "experiments", {"config": CONFIG, "b64Tgz": base64.b64encode(packed).decode()})
    assert (refused.status, refused.error["code"]) == (413, 8), refused.text
