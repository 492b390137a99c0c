"""``det-core checkpoint`` as a person or a script runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core import client
from det_core.cli import main
from det_core.storage import DirectoryStore, Owner, RetentionDecision, RetentionPolicy
from support import commands
from support.stored import FILES, put, run_with_checkpoints

SIZE = 71_000 + len('{\n  "steps_completed": 10\n}')


def det_core(*arguments: object, check: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``det-core checkpoint`` and expect an exit status."""
    done = commands.det_core("checkpoint", *arguments, check=check, **more)
    if check == 1 and done.stderr:
        assert all(line.startswith("det-core: ") for line in done.stderr.splitlines()), done.stderr
    return done


def as_json(*arguments: object, check: int = 0) -> Any:
    """Return the output with ``--json``."""
    return json.loads(det_core(*arguments, "--json", check=check).stdout)


def damage(store: Any, storage_id: str, path: str) -> None:
    """Flip a bit in a file."""
    file = Path(store.root, storage_id, path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_list(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20])
    ids = [f"c{step}-{run_id[-6:]}" for step in (20, 10)]
    with store.read_lease(ids[1], Owner.current("x", 0)):
        lines = [line.split() for line in det_core("list").stdout.splitlines()]
    assert lines[0] == ["CHECKPOINT", "RUN", "STEPS", "SIZE", "FILES", "SAVED", "STATE"]
    assert [[*line[:6], *line[8:]] for line in lines[1:]] == [
        [ids[0], run_id, "20", "71", "kB", "4", "complete"],
        [ids[1], run_id, "10", "71", "kB", "4", "in", "use"],
    ]
    rows = as_json("list")
    assert [row["storage_id"] for row in rows] == ids
    about = {"run_id": run_id, "restart": 0, "steps_completed": 20, "size": SIZE, "files": 4, "state": "complete"}
    assert about.items() <= rows[0].items()
    assert as_json("list", "--limit", 1) == rows[:1]
    assert rows == as_json("list", "--run", run_id[:-1]) == as_json("list", "--storage", store.root)
    put(store, "another", 5, tmp_path, run_id="other")
    assert len(as_json("list", "--storage", store.root)) == 3
    assert [row["storage_id"] for row in as_json("list", "--storage", store.root, "--run", "oth")] == ["another"]


def test_describe(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10])
    put(
        store,
        "noted",
        20,
        tmp_path,
        run_id=run_id,
        ordinal=2,
        metadata={"note": "a [bold]note[/bold]", "deep": {"a": 1}},
    )
    text = det_core("describe", "latest").stdout
    for words in ("noted", run_id, "steps_completed: 20", "complete", f"{store.root}/noted", "a [bold]note[/bold]",
                  '{"a": 1}', "71.1 kB", "sub/optimizer.pt", "70 kB"):  # fmt: skip
        assert words in text
    shown = as_json("describe", "c10")
    assert shown["metadata"] == {"steps_completed": 10}
    assert {path: shown["resources"][path] for path in FILES} == {path: len(data) for path, data in FILES.items()}
    assert shown["path"] == f"{store.root}/c10-{run_id[-6:]}"
    damage(store, "noted", "metadata.json")
    assert "metadata.json" in as_json("describe", "noted", check=1)["problem"]
    assert "metadata.json" in det_core("describe", "noted", check=1).stdout
    assert "no checkpoint 'nope' of run" in det_core("describe", "nope", check=1).stderr
    assert "must be the bare name of a checkpoint" in det_core("describe", f"{store.root}/noted", check=1).stderr


def test_download(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10])
    one = f"c10-{run_id[-6:]}"
    out = tmp_path / "some" / "out"
    said = det_core("download", "c1", out).stdout
    assert said == f"downloaded checkpoint {one} to {out}: 71 kB in 4 file(s)\n"
    assert {path: (out / path).read_bytes() for path in FILES} == FILES
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine").write_text("mine")
    det_core("download", one, tmp_path / "again")
    assert (tmp_path / "again" / "mine").read_text() == "mine"
    told = as_json("download", "latest", tmp_path / "again")
    assert told == {"storage_id": one, "folder": str(tmp_path / "again"), "verified": True, "size": SIZE, "files": 4}
    damage(store, one, "sub/optimizer.pt")
    done = det_core("download", "latest", tmp_path / "bad", check=1)
    assert "sub/optimizer.pt" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "bad").exists()
    (tmp_path / "file").write_text("x")
    assert f"Directory '{tmp_path}/file' is a file" in det_core("download", "latest", tmp_path / "file", check=2).stderr


HELD_UP = """
import os, sys
from det_core.storage import Disk

do = Disk.do
def held_up(self, operation, path, function, *args):
    if operation == "write" and "/.det_core-tmp-" in path:
        os.write(1, b"copying\\n")  # in one piece, as several threads copy
        sys.stdin.read()
    return do(self, operation, path, function, *args)
Disk.do = held_up

from det_core.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("there", [True, False])
def test_download_that_is_ended_leaves_nothing_for_good(home: Path, tmp_path: Path, there: bool) -> None:
    """SIGTERM cleans up; what kill -9 leaves goes with the next download."""
    run_with_checkpoints(home, tmp_path)
    target = tmp_path / "targets" / "out"
    (target if there else target.parent).mkdir(parents=True)
    before = [*target.parent.rglob("*")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [sys.executable, "-c", HELD_UP, "checkpoint", "download", "latest", str(target)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "copying\n"
            process.send_signal(number)
            if number == signal.SIGTERM:
                process.communicate()  # ends its input, so that it goes on
        assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
        left = [path for path in target.parent.rglob("*") if path not in before]
        assert bool(left) == (number == signal.SIGKILL), left
    det_core("download", "latest", target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert {*FILES, "metadata.json"} == {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}


def test_verify_names_what_is_damaged_and_goes_on(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20, 30, 40])
    ids = [f"c{step}-{run_id[-6:]}" for step in (10, 20, 30, 40)]
    assert det_core("verify", "c10", "latest").stdout.splitlines() == [
        f"{ids[0]}  complete: 71 kB in 4 file(s)",
        f"{ids[3]}  complete: 71 kB in 4 file(s)",
    ]
    damage(store, ids[0], "model.pt")
    Path(store.root, ids[0], "sub/optimizer.pt").unlink()
    Path(store.root, ids[1], "empty").write_text("x")
    done = det_core("verify", "--all", check=1)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("  model.pt differs from its manifest")
    assert "`det-core checkpoint rm` a damaged checkpoint" in done.stderr
    assert [line.split("  ")[1].split(":")[0] for line in lines if not line.startswith("  ")] == [
        "damaged", "damaged", "complete", "complete",
    ]  # fmt: skip
    for line, path in zip((lines[1], lines[2], lines[4]), ("model.pt", "sub/optimizer.pt", "empty"), strict=True):
        assert line.startswith("  ") and path in line
    results = as_json("verify", "--all", check=1)
    assert [(r["storage_id"], r["state"], len(r["problems"])) for r in results] == [
        (ids[0], "damaged", 2), (ids[1], "damaged", 1), (ids[2], "complete", 0), (ids[3], "complete", 0),
    ]  # fmt: skip
    assert as_json("verify", "c30")[0]["problems"] == []
    for wrong in ((), ("--all", "c10")):
        assert "name the checkpoints to verify, or --all" in det_core("verify", *wrong, check=2).stderr


def test_unreadable_checkpoint_of_another_run_stops_no_command(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20])
    ids = [f"c{step}-{run_id[-6:]}" for step in (10, 20)]
    Path(store.root, "theirs", ".det_core", "manifest.json").mkdir(parents=True)
    assert [line.split()[0] for line in det_core("list").stdout.splitlines()[1:]] == ids[::-1]
    warning = "det-core: warning: not listed: checkpoint store"
    assert [row["state"] for row in as_json("verify", "--all", "--storage", store.root)] == ["complete", "complete"]
    done = det_core("gc", "--keep-latest", 1, "--storage", store.root)
    assert done.stderr.startswith(warning) and done.stderr.count("theirs") == 1
    assert [found.storage_id for found in store.list()] == ids[1:]
    assert "theirs" in det_core("verify", "theirs", "--storage", store.root, check=1).stderr


def test_one_written_by_others(home: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "store" / "theirs"
    foreign.mkdir(parents=True)
    (foreign / "weights").write_bytes(b"w" * 10)
    where = ("--storage", tmp_path / "store")
    assert "theirs  unverified: 10 B in 1 file(s)" in det_core("verify", "theirs", *where).stdout
    assert as_json("verify", "theirs", *where)[0]["state"] == "unverified"
    assert "unverified" in det_core("describe", "theirs", *where).stdout
    assert "unverified" in det_core("download", "theirs", tmp_path / "out", *where).stderr
    det_core("gc", "--keep-latest", 1, *where)
    assert (foreign / "weights").exists()


def test_rm(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20, 30, 40])
    ids = [f"c{step}-{run_id[-6:]}" for step in (10, 20, 30, 40)]
    assert "--yes" in det_core("rm", "c10", check=2).stderr
    assert "no checkpoint 'nope'" in det_core("rm", "c10", "nope", "--yes", check=1).stderr
    with store.read_lease(ids[0], Owner.current("x", 0)):
        done = det_core("rm", "c10", "c20", "--yes", check=1)
    assert f"{ids[0]}: a process is reading it. Nothing was deleted" in done.stderr
    assert len(store.list()) == 4
    assert det_core("rm", "c10", ids[0], "c20", "--yes").stdout == f"deleted {ids[0]}\ndeleted {ids[1]}\n"
    assert as_json("rm", "c30", "-y") == [ids[2]]
    assert [h.storage_id for h in store.list()] == [ids[3]]
    shown = commands.det_core("runs", "show", "latest", "--json")
    assert [c["storage_id"] for c in json.loads(shown.stdout)["checkpoints"]] == [ids[3]]


def test_rm_of_the_newest_warns_what_the_next_start_is_from(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = [run_with_checkpoints(home, tmp_path, [10, 20, 30], storage=shared)[0] for _ in "ab"]
    first, last = ([f"c{step}-{run_id[-6:]}" for step in (10, 20, 30)] for run_id in runs)
    warning = "det-core: warning: {} is the newest of its run {}: its next start will be {}\n"
    done = det_core("rm", last[2], "--yes")
    assert done.stderr == warning.format(last[2], runs[1], f"from {last[1]}, steps 20")
    assert det_core("rm", first[0], "--storage", shared, "--yes").stderr == ""
    done = det_core("rm", *last[:2], first[2], "--storage", shared, "--yes", "--json")
    assert done.stderr == warning.format(last[1], runs[1], "without a checkpoint") + warning.format(
        first[2], runs[0], f"from {first[1]}, steps 20"
    )
    done = det_core("rm", first[1], "--run", runs[1], "--yes")
    assert done.stderr == warning.format(first[1], runs[0], "without a checkpoint")


def test_gc_teaches_before_it_deletes(home: Path, tmp_path: Path) -> None:
    _, store = run_with_checkpoints(home, tmp_path, losses=[3, 1, 2])
    for wrong, teaches in [
        ((), "--keep-latest N, --keep-best N --metric M, --keep-every STEPS or --keep-newer 7d"),
        (("--dry-run",), "say what is to stay"),
        (("--keep-best", 1), "--keep-best N and --metric M go together"),
        (("--keep-latest", 1, "--metric", "loss"), "--keep-best N and --metric M go together"),
        (("--keep-best", 1, "--metric", "acc.top1"), "which acc.top1 is best? Add --larger-is-better or --smaller-is"),
        (("--keep-latest", 0), "expected an integer of at least 1"),
        (("--keep-latest", "x"), "'x' is not a valid integer"),
        (("--keep-newer", "7"), "'7' is not a duration: expected seconds, a timedelta, or a text such as '90m'"),
    ]:
        assert teaches in det_core("gc", *wrong, check=2).stderr
    done = det_core("gc", "--keep-best", 1, "--metric", "val_loss", check=1)
    assert "no checkpoint has the metric val_loss, so all stay; validation metrics are acc.top1, loss" in done.stderr
    assert len(store.list()) == 3


def test_gc_says_why_each_stays_and_deletes_the_rest(home: Path, tmp_path: Path) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20, 30, 40, 50], losses=[3, 1, 2, 4, 5])
    ids = {step: f"c{step}-{run_id[-6:]}" for step in (10, 20, 30, 40, 50)}
    keep = ("--keep-latest", 1, "--keep-best", 1, "--metric", "loss", "--keep-every", 40)
    with store.read_lease(ids[30], Owner.current("x", 0)):
        done = det_core("gc", *keep, "--dry-run")
    verdicts = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    for step, why in {
        50: "stays: the latest, the newest that is intact",
        40: "stays: every 40 steps",
        30: "stays: in use",
        20: "stays: the best by smallest loss",
        10: "would be deleted",
    }.items():
        assert verdicts[ids[step]].endswith(f"  {why}")
    assert done.stderr == "det-core: 1 of 5 checkpoint(s) would be deleted; nothing was\n"
    assert len(store.list()) == 5
    planned = as_json("gc", *keep, "-n")
    assert [(v["storage_id"], v["delete"], v["deleted"]) for v in planned][:3] == [
        (ids[10], True, False), (ids[20], False, False), (ids[30], True, False),
    ]  # fmt: skip
    assert planned[1]["metrics"] == {"loss": 1.0}
    kept = "kept: the latest, the best by smallest loss, every 40 steps"
    lines = [f"deleted {ids[10]}", f"deleted {ids[30]}", f"deleted 2 of 5 checkpoint(s); {kept}"]
    assert det_core("gc", *keep).stdout.splitlines() == lines
    assert [h.steps_completed for h in store.list()] == [20, 40, 50]
    assert det_core("gc", *keep).stdout == f"deleted 0 of 3 checkpoint(s); {kept}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_gc_beside_a_training_that_saves_deletes_and_counts_what_was_judged(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    run_id, store = run_with_checkpoints(home, tmp_path, [10, 20, 30])
    really = client.Checkpoints.preview_gc

    def judge_and_save(self: client.Checkpoints, policy: RetentionPolicy) -> list[RetentionDecision]:
        verdicts = really(self, policy)
        put(store, f"later-{len(store.list())}", 40, tmp_path, run_id=run_id, ordinal=len(store.list()) + 1)
        return verdicts

    monkeypatch.setattr(client.Checkpoints, "preview_gc", judge_and_save)
    assert main(["checkpoint", "gc", "--keep-latest", "1", *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr().out
    if as_json:
        assert [(v["storage_id"][:3], v["delete"], v["deleted"]) for v in json.loads(said)] == [
            ("c10", True, True), ("c20", True, True), ("c30", False, False),
        ]  # fmt: skip
    else:
        assert said.splitlines()[-1] == "deleted 2 of 3 checkpoint(s); kept: the latest"
    assert [h.storage_id[:3] for h in store.list()] == ["c30", "lat"]


def test_gc_of_a_storage_with_several_runs(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = [run_with_checkpoints(home, tmp_path, [10, 20], storage=shared)[0] for _ in "ab"]
    store = DirectoryStore(shared)
    done = det_core("gc", "--keep-latest", 1, "--storage", shared, check=2)
    assert "has checkpoints of 2 runs: name one with --run, or add --all-runs" in done.stderr
    det_core("gc", "--keep-latest", 1, "--storage", shared, "--run", runs[0])
    assert [(h.run_id, h.steps_completed) for h in store.list(runs[0])] == [(runs[0], 20)]
    assert len(store.list(runs[1])) == 2
    det_core("gc", "--keep-latest", 1, "--storage", shared, "--all-runs")
    assert [h.steps_completed for h in store.list(runs[1])] == [20]
