"""Context directories, and what of them is refused."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from support.running_master import Running


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
