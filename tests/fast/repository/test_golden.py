"""Files of an earlier version are read and continued; ``tests/golden/make.py`` describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from golden.make import KEYS, det_core, files, lay_out, run, told
from support.servers import S3Server


@pytest.fixture
def golden(tmp_path: Path, home: Path) -> dict[str, Any]:
    """Copy the golden files into this test's home and return the recorded output of commands."""
    lay_out(tmp_path)
    said: dict[str, Any] = json.loads((tmp_path / "told.json").read_text())
    return said


@pytest.fixture
def in_s3(tmp_path: Path, home: Path, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put the golden objects into a bucket and return its ``checkpoint_storage``; otherwise as ``golden``."""
    bucket = moto_server.make_bucket()
    lay_out(tmp_path, server=moto_server.url, bucket=bucket)
    with moto_server.client() as s3:
        for path in (tmp_path / "bucket").rglob("*"):
            if path.is_file():
                s3.put_object(Bucket=bucket, Key=str(path.relative_to(tmp_path / "bucket")), Body=path.read_bytes())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    return {"type": "s3", "bucket": bucket, "prefix": "models", "endpoint_url": moto_server.url, **KEYS}


@pytest.fixture
def master(golden: dict[str, Any], home: Path) -> Iterator[client.Master]:
    """Yield a session with the master of the golden home."""
    det_core("master", "up")
    with client.connect(home=home) as session:
        yield session


def assert_holds(now: Any, before: Any, where: str) -> None:
    """Assert that ``now`` has all that ``before`` has; it may have more keys."""
    if isinstance(before, dict):
        assert before.keys() <= now.keys(), where
        for key, value in before.items():
            assert_holds(now[key], value, f"{where}.{key}")
    elif isinstance(before, list):
        assert len(now) == len(before), where
        for number, value in enumerate(before):
            assert_holds(now[number], value, f"{where}[{number}]")
    else:
        assert now == before, where


def id_of(name: str) -> str:
    """Return the ID of the run of that name."""
    (found,) = told(f"runs list --name {name}")
    return str(found["run_id"])


def assert_counted(run_id: str, ranks: int, before: dict[str, Any], folder: Path) -> None:
    """Assert that a run was counted to its end, and that its last start resumed from the newest checkpoint."""
    shown, rows = told(f"runs show {run_id}"), told(f"runs export {run_id}")
    assert (shown["state"], shown["restarts"]) == ("completed", before["restarts"] + 1)
    start = before["checkpoints"][-1]["steps_completed"]
    for row in rows:
        new, step = row["restart"] == shown["restarts"], row["steps_completed"]
        assert (step > start) if new else row["superseded"] or step <= start
    stand = {(row["group"], row["steps_completed"]): row["metrics"] for row in rows if not row["superseded"]}
    expected: dict[tuple[str, int], Any] = {}
    for step in range(1, 17):
        expected["training", step] = {"loss": 1 / step, "deep": {"inf": "Infinity"}}
        if step % 4 == 0:
            expected["validation", step] = {"loss": 2 / step, "word": "ü"}
        if ranks == 2:
            expected["rank1", step] = {"square": step * step}
    assert stand == expected and len(stand) == sum(not row["superseded"] for row in rows)
    with client.checkpoints(run=run_id) as checkpoints:
        checkpoints["latest"].download(folder)
    for rank in range(ranks):
        assert json.loads((folder / f"rank{rank}" / "seen.json").read_text()) == list(range(1, 17))


def assert_whole(run_id: str, before: dict[str, Any], folder: Path) -> None:
    """Assert that a run's checkpoints are listed as before, intact, and restored as they were written."""
    with client.checkpoints(run=run_id) as checkpoints:
        found = list(checkpoints)
        assert [c.storage_id for c in found] == [c["storage_id"] for c in before["checkpoints"]]
        for checkpoint, known in zip(found, before["checkpoints"], strict=True):
            assert checkpoint.verified and checkpoint.verify() == []
            assert checkpoint.resources == known["resources"] and checkpoint.metadata == known["metadata"]
            checkpoint.download(folder / checkpoint.storage_id)
            for path in (folder / checkpoint.storage_id).glob("rank*/seen.json"):
                assert json.loads(path.read_text()) == list(range(1, known["steps_completed"] + 1))


def test_golden_files_are_small_and_hold_no_token() -> None:
    assert sum(path.stat().st_size for path in files()) < 1_000_000
    assert not [path for path in files() if "token" in path.name]
    assert any(path.match("home/runs/*/journal-*.1.jsonl") for path in files())


def test_golden_runs_and_rows_are_unchanged(golden: dict[str, Any]) -> None:
    commands = [command for command in golden if command.startswith("runs")]
    assert len(commands) == 1 + 8 + 4
    for command in commands:
        assert_holds(told(command), golden[command], command)
    assert told(f"runs show {id_of('counted-by-1')}")["torn_lines"] == 1


def test_golden_checkpoints_in_directories_are_intact(golden: dict[str, Any], tmp_path: Path) -> None:
    for shown in [golden[command] for command in golden if command.startswith("runs show")]:
        if shown["storage"] is None:
            assert shown["checkpoints"]
            assert_whole(shown["run_id"], shown, tmp_path / shown["name"])
    assert det_core("checkpoint", "verify", "--all", "--run", id_of("counted-by-2")).count("complete: ") == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_golden_run_resumes(golden: dict[str, Any], tmp_path: Path, ranks: int) -> None:
    run_id = id_of(f"counted-by-{ranks}")
    for output in run(tmp_path, "counting.py", ranks=ranks, NAME=f"counted-by-{ranks}"):
        assert output.endswith("\n0"), output
    assert_counted(run_id, ranks, golden[f"runs show {run_id}"], tmp_path / "last")


@pytest.mark.parametrize("ranks", [2])  # that of one rank: tests/stores/test_golden_objects.py
def test_golden_run_in_object_store_is_read_and_resumes(in_s3: dict[str, Any], tmp_path: Path, ranks: int) -> None:
    name = f"counted-in-s3-by-{ranks}"
    run_id = id_of(name)
    before = json.loads((tmp_path / "told.json").read_text())[f"runs show {run_id}"]
    assert len(before["checkpoints"]) >= 2
    assert_whole(run_id, before, tmp_path / "before")
    for output in run(tmp_path, "counting.py", ranks=ranks, NAME=name, STORAGE=json.dumps(in_s3)):
        assert output.endswith("\n0"), output
    assert_counted(run_id, ranks, before, tmp_path / "last")


def test_golden_searches_are_known_and_continued(master: client.Master, golden: dict[str, Any], tmp_path: Path) -> None:
    for command in golden:
        if not command.startswith("runs"):
            assert_holds(told(command), golden[command], command)
    finished, paused, kept = (client.experiment(number, master) for number in (1, 2, 3))
    finished.download_checkpoint(tmp_path / "best")
    assert (tmp_path / "best" / "step.json").read_text() == "4"
    for experiment in (paused, kept):
        experiment.activate()
    states = [experiment.wait() for experiment in (paused, kept)]
    assert states == ["COMPLETED", "COMPLETED"], (paused.error, kept.error)
    assert [trial.steps_completed for trial in paused.trials()] == [8, 4, 16, 8]
    (bracket,) = kept.search()["rungs"]
    first, other = kept.trials()  # that one was stopped at the first rung
    assert [[e["metric"] for e in rung["entries"]] for rung in bracket["rungs"]] == [[960, 1740], [-2160]]
    assert (first.hparams["lr"], other.hparams["lr"]) == (4, 1)
    for number, stopped, length in ((4, 5, 8), (first.id, 1010, 1040)):
        rows = told(f"trial metrics {number}")
        assert [row["steps_completed"] for row in rows] == list(range(1, length + 1))
        runs = [row["trial_run_id"] for row in rows]
        assert runs[stopped:] == [runs[stopped - 1] + 1] * (length - stopped)
    assert_holds(told("trial metrics 4")[:5], golden["trial metrics 4"], "trial 4")
