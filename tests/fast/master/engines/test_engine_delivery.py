"""Files of an allocation arrive whole from a machine elsewhere, however late, often and mixed up their pieces come."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import Conflict, Invalid, MasterError, TooMuch
from det_core.master.engines import AllocationFolder, Copy, Piece
from det_core.master.engines._delivery import MAX_PIECE_BYTES, digest, pack_exit
from det_core.master.engines._supervisor._log import SEGMENT_BYTES
from det_core.master.engines._verdict import Files, Seen, verdict
from det_core.master.scheduler import Cause

LOG = "log/0.supervisor.0"
JOURNAL = "journal/journal-0-3.jsonl"
END = {"status": 0, "signal": None, "started": True, "killed": False, "time": 5.0}


def copy(path: Path, node: int = 0) -> Copy:
    return Copy(AllocationFolder(path), node)


def take_exit(found: Copy, sizes: dict[str, int], facts: dict[str, Any] = END) -> int:
    data = pack_exit(facts, sizes)
    return found.take(Piece("exit.json", data, digest=digest(data)))


@pytest.mark.parametrize("seed", range(3))
def test_pieces_in_any_order_make_the_files(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = {name: rng.randbytes(rng.randrange(2000)) for name in (LOG, "log/0.supervisor.7000", JOURNAL)}
    sizes = {name: len(data) for name, data in files.items()}
    folder = AllocationFolder(tmp_path)
    while folder.exit() is None:
        if rng.random() < 0.1:
            take_exit(copy(tmp_path), sizes)
        name = rng.choice(list(files))
        begin = rng.randrange(sizes[name] + 1)
        piece = files[name][begin : begin + rng.randrange(500)]
        path = tmp_path / name
        before = path.stat().st_size if path.exists() else 0
        size = copy(tmp_path).take(Piece(name, piece, begin))
        assert size == (before if begin > before else max(before, begin + len(piece)))
    assert {name: (tmp_path / name).read_bytes() for name in files if sizes[name]} == {
        name: data for name, data in files.items() if data
    }
    assert folder.exit() == END


def test_end_waits_for_all_files_that_it_names(tmp_path: Path) -> None:
    found = copy(tmp_path)
    found.take(Piece(LOG, b"on"))
    take_exit(found, {LOG: 4, JOURNAL: 1})
    found.take(Piece(JOURNAL, b"x"))
    assert AllocationFolder(tmp_path).exit() is None
    found.take(Piece(LOG, b"e\n", 2))
    assert AllocationFolder(tmp_path).exit() == END
    take_exit(found, {LOG: 4, JOURNAL: 1})
    assert found.take(Piece(LOG, b"one\nmore")) == 4
    assert (tmp_path / LOG).read_bytes() == b"one\n"


def test_end_holds_without_files_that_are_lost_for_good(tmp_path: Path) -> None:
    lost = Seen(Cause.LOST, "its node is down")
    copy(tmp_path).take(Piece(LOG, b"1.000000 o one\n"))
    assert verdict(Files.read(AllocationFolder(tmp_path)), lost, False, 7.0).cause is Cause.LOST
    take_exit(copy(tmp_path), {LOG: 40})
    report = verdict(Files.read(AllocationFolder(tmp_path)), lost, False, 7.0)
    assert (report.status, report.cause, report.last_lines) == (0, Cause.NONE, ("one",))


def test_middle_of_a_long_log_is_deleted_in_the_copy(tmp_path: Path) -> None:
    names = [f"log/0.supervisor.{number * SEGMENT_BYTES}" for number in range(40)]
    for number, name in enumerate(names):
        copy(tmp_path).take(Piece(name, b"x"))
        copy(tmp_path).take(Piece(names[number // 2], b"x"))
        assert len(list((tmp_path / "log").iterdir())) <= 16
    kept = names[:8] + names[32:]
    assert {path.name for path in (tmp_path / "log").iterdir()} == {name.removeprefix("log/") for name in kept}
    take_exit(copy(tmp_path), dict.fromkeys(kept, 1))
    assert AllocationFolder(tmp_path).exit() == END


@pytest.mark.parametrize("complete", [False, True])
def test_another_end_is_refused(tmp_path: Path, complete: bool) -> None:
    found = copy(tmp_path)
    take_exit(found, {} if complete else {LOG: 4})
    with pytest.raises(Conflict):
        take_exit(found, {}, {**END, "status": 1})
    assert Files.read(AllocationFolder(tmp_path)).exit == END


def test_older_list_of_processes_that_comes_late_is_ignored(tmp_path: Path) -> None:
    young = json.dumps({"boot": "b", "supervisor": [1, 2], "script": [3, 4]}).encode()
    old = json.dumps({"boot": "b", "supervisor": [1, 2]}).encode()
    for data in (old, young, old):
        copy(tmp_path).take(Piece("processes", data, digest=digest(data)))
    assert (tmp_path / "processes").read_bytes() == young


def test_nodes_have_an_end_each_of_which_the_first_failure_counts(tmp_path: Path) -> None:
    line = b"1.000000 o of node %d\n"
    folder = AllocationFolder(tmp_path)
    for node, (status, time) in {2: (1, 9.0), 1: (3, 8.0), 0: (0, 7.0)}.items():
        name = f"log/{node}.supervisor.0"
        take_exit(copy(tmp_path, node), {name: len(line % node)}, {**END, "status": status, "time": time})
        copy(tmp_path, node).take(Piece(name, line % node))
        assert folder.of_node(node).exit() is not None
    report = verdict(Files.read(folder, nodes=3), None, False, 7.0)
    assert (report.status, report.time, report.last_lines) == (3, 8.0, ("of node 1",))
    assert verdict(Files.read(folder, nodes=1), None, False, 7.0).status == 0
    shutil.rmtree(tmp_path / "nodes" / "1")
    shutil.rmtree(tmp_path / "nodes" / "2")
    assert verdict(Files.read(folder, nodes=2), None, False, 7.0).cause is Cause.NOT_STARTED, "one is missing"


@pytest.mark.parametrize(
    ("name", "data", "check", "error"),
    [
        ("kill", b"1 0", None, Invalid),
        ("ticket.json", b"{}", None, Invalid),
        ("log/1.supervisor.0", b"x", None, Invalid),
        ("log/0.master.0", b"x", None, Invalid),
        ("log/../exit.json", b"x", None, Invalid),
        ("/etc/passwd", b"x", None, Invalid),
        ("journal/journal-0-0.jsonl\n", b"x", None, Invalid),
        ("processes", b"{}", None, Invalid),
        ("exit.json", b"{}", digest(b"other"), Invalid),
        ("exit.json", b"no", digest(b"no"), Invalid),
        ("exit.json", b'{"exit": {}}', digest(b'{"exit": {}}'), Invalid),
        ("exit.json", pack_exit(END, {"kill": 1}), digest(pack_exit(END, {"kill": 1})), Invalid),
        (LOG, bytes(MAX_PIECE_BYTES + 1), None, TooMuch),
    ],
)
def test_what_is_not_in_the_list_is_refused(
    tmp_path: Path, name: str, data: bytes, check: str | None, error: type[MasterError]
) -> None:
    with pytest.raises(error):
        copy(tmp_path).take(Piece(name, data, digest=check))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "out").touch()
    (tmp_path / LOG).symlink_to(tmp_path / "out")
    with pytest.raises(OSError):
        copy(tmp_path).take(Piece(LOG, b"x"))
    assert (tmp_path / "out").read_bytes() == b""
