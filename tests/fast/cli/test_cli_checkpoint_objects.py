"""``det-core checkpoint`` about what a run kept on an object store: found by the run, opened with keys of one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from det_core import client, core
from det_core.storage._object_store import ObjectStore
from support import commands
from support.buckets import keys
from support.servers import S3Server

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
det_core = partial(commands.det_core, "checkpoint")


@pytest.fixture
def storage(moto_server: S3Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a storage with three checkpoints of a run; its keys are in the environment."""
    for key in KEYS:
        monkeypatch.setenv(key, "in-the-environment")
    given = moto_server.storage(moto_server.make_bucket(), "a/b")
    manual = core.TensorboardMode.MANUAL  # what writes event files imports all of torch
    with core.init(name="s3", max_length=3, checkpoint_storage=given, tensorboard_mode=manual) as ctx:
        for step in range(1, 4):
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "model.pt").write_bytes(b"m" * 1000 * step)
    return {key: value for key, value in given.items() if key not in ("access_key", "secret_key")}


def test_what_a_run_kept_elsewhere_is_found_by_the_run(storage: dict[str, str], home: Path, tmp_path: Path) -> None:
    journal = "".join(path.read_text() for path in home.glob("runs/*/journal*"))
    assert storage["endpoint_url"] in journal
    assert "secret_key" not in journal
    rows = json.loads(det_core("list", "--json").stdout)
    assert [(row["steps_completed"], row["state"]) for row in rows] == [
        (3, "complete"),
        (2, "complete"),
        (1, "complete"),
    ]
    assert json.loads(det_core("list", "--json", "--storage", json.dumps(storage)).stdout) == rows
    shown = det_core("describe", "latest").stdout
    assert f" s3://{storage['bucket']}/a/b\n" in shown and "model.pt" in shown
    command = [sys.executable, "-m", "det_core.cli", "checkpoint", "download", "latest", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "", "connections are closed"
    assert (tmp_path / "out" / "model.pt").read_bytes() == b"m" * 3000
    assert "would be deleted" in det_core("gc", "--keep-latest", 2, "--dry-run").stdout
    done = det_core("gc", "--keep-latest", 2)
    assert done.stdout == f"deleted {rows[2]['storage_id']}\ndeleted 1 of 3 checkpoint(s); kept: the latest 2\n"
    assert len(client.run("latest").checkpoints()) == 2
    det_core("rm", rows[1]["storage_id"][:13], "--yes")
    assert [row["steps_completed"] for row in json.loads(det_core("list", "--json").stdout)] == [3]


def test_rm_of_a_run_leaves_nothing_of_it_in_the_bucket(storage: dict[str, str], home: Path, tmp_path: Path) -> None:
    run_id = client.run("latest").run_id
    (tmp_path / "events").write_bytes(b"x")
    with client.checkpoints() as checkpoints:
        store = checkpoints._store
        assert isinstance(store, ObjectStore)
        store.put_file(tmp_path / "events", f"tensorboard/{run_id}/events")
        done = commands.det_core("runs", "rm", run_id, "--yes")
        where = done.stdout.splitlines()[1].removeprefix("deleted its checkpoints and TensorBoard files in ")
        assert json.loads(where) == {**storage, "prefix": "a/b"}
        assert keys(store) == set()
    assert not (home / "runs" / run_id).exists()
