"""A script that ends without closing its context: saved, reported, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.storage import open_store
from support import scripts
from support.buckets import closing
from support.servers import S3Server

SCRIPT = """
import json, sys
from det_core import core
{before}
def train():
    ctx = core.init(name="unclosed", checkpoint_storage=json.loads(sys.argv[1]))
    ctx.train.report_training_metrics(1, {{"loss": 0.5}})
    with ctx.checkpoint.store_path({{"steps_completed": 1}}, blocking=False) as (path, storage_id):
        for i in range(20):
            (path / f"file{{i}}").write_bytes(b"x" * 1000)
train()
{end}
"""


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("det_core: ")]


@pytest.mark.parametrize(
    ("kind", "end"), [("folder", "raise ArithmeticError('x')"), ("bucket", ""), ("bucket", "raise SystemExit(0)")]
)
def test_unclosed_context_keeps_saves_and_reports(
    kind: str, end: str, tmp_path: Path, home: Path, request: pytest.FixtureRequest
) -> None:
    storage: Any = str(tmp_path / "store")
    if kind == "bucket":
        server: S3Server = request.getfixturevalue("moto_server")
        storage = server.storage(server.make_bucket())
    done = scripts.run(SCRIPT.format(before="", end=end), tmp_path, json.dumps(storage))
    assert done.returncode == (1 if "Error" in end else 0), done.stdout
    with closing() as opened:
        store = opened(open_store(storage, tmp_path, scratch=tmp_path / "scratch"))
        assert len(store.list()) == 1, done.stdout
    run = client.run("latest")
    assert run.state == "unclosed"
    assert [row.steps_completed for row in run.rows("training")] == [1]
    assert len(run.checkpoints()) == 1
    _, last = lines(done.stdout)
    assert "not closed, so the outcome is unknown" in last and "with core.init() as ctx:" in last
    assert f"DET_CORE_RESUME={run.run_id}" in last


def test_closed_context_prints_no_unclosed_notice(tmp_path: Path, home: Path) -> None:
    script = "from det_core import core\nctx = core.init()\nctx.close()\nwith core.init() as ctx:\n    pass\n"
    done = scripts.run(script, tmp_path)
    assert done.returncode == 0 and "not closed" not in done.stdout
    assert client.run("latest").state == "completed"


def test_forked_child_leaves_closing_to_its_parent(tmp_path: Path, home: Path) -> None:
    script = """
import multiprocessing
from det_core import core
ctx = core.init()
child = multiprocessing.get_context("fork").Process(target=print, args=("in the child",))
child.start()
child.join()
ctx.train.report_training_metrics(1, {"loss": 0.5})
ctx.close()
"""
    done = scripts.run(script, tmp_path)
    assert done.returncode == 0 and "in the child" in done.stdout and "not closed" not in done.stdout
    assert client.run("latest").state == "completed"


def test_unclosed_context_prints_close_failure(tmp_path: Path, home: Path) -> None:
    """Nobody is left to be raised at."""
    before = """
from det_core.storage import _directory
def full(*_): raise OSError(28, "no room")
_directory.publish = full
"""
    done = scripts.run(SCRIPT.format(before=before, end=""), tmp_path, json.dumps(str(tmp_path / "store")))
    assert any("was not saved in the background" in line and "no room" in line for line in lines(done.stdout)), (
        done.stdout
    )
