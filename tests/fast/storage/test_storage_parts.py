"""The parts of a directory store: names, the manifest, owners, threads, pieces."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.errors import CheckpointCorrupt, CheckpointError, StorageError
from det_core.storage import Disk, FileEntry, Header, Manifest, Owner, scan
from det_core.storage._copy import Copier, CopyTask, pieces, split_work
from det_core.storage._manifest import decode_metadata, encode_metadata
from det_core.storage._names import glob_pattern, is_relative_path, parents
from det_core.storage._threads import ProgressMeter, map_threads

HEADER = Header("run", 0, 1, "2026-11-21T12:00:00.000000+00:00", 7, "id")
NAME = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..", ".det_core")
)
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join)


class TestNames:
    @given(PATH)
    def test_is_relative_path_accepts_plain_names(self, path: str) -> None:
        assert is_relative_path(path)
        assert os.path.normpath(path) == path

    @pytest.mark.parametrize("path", ["", "/", "/a", "a/", "a//b", "./a", "a/..", "../a", "a/./b", "a\0b", None, 3])
    def test_is_relative_path_rejects_others(self, path: object) -> None:
        assert not is_relative_path(path)

    def test_parents_returns_each_directory_above(self) -> None:
        assert parents("a") == []
        assert parents("a/b/c") == parents("a/b/c/") == ["a/", "a/b/"]

    @pytest.mark.parametrize(
        ("glob", "yes", "no"),
        [
            ("**/*", ["a", "a/b/c"], []),
            ("*", ["a", ".b"], ["a/b"]),
            ("*.pt", ["x.pt"], ["x.ptx", "a/x.pt", "xpt"]),
            ("**/*.pt", ["x.pt", "a/b/x.pt"], ["x.txt"]),
            ("a/**", ["a/b", "a/b/c"], ["b/a", "a"]),
            ("a?c", ["abc"], ["a/c", "ac"]),
            ("[a]", ["[a]"], ["a"]),
            ("../*", [], ["a"]),
        ],
    )
    def test_glob_pattern_matches_like_gitignore_paths(self, glob: str, yes: list[str], no: list[str]) -> None:
        assert [path for path in yes + no if glob_pattern(glob).fullmatch(path)] == yes


def earlier(manifest: Manifest) -> dict[str, Any]:
    """Return what earlier versions wrote as this manifest."""
    body: dict[str, Any] = json.loads(manifest.encode())
    del body["digest"], body["content"]
    return body


class TestManifest:
    @given(st.dictionaries(PATH, st.integers(0, 1 << 30)), st.sets(PATH.map(lambda p: p + "/")))
    def test_manifest_round_trips(self, sizes: dict[str, int], directories: set[str]) -> None:
        files = {p: FileEntry(n, tuple("ab" for _ in range(-(-n // (16 << 20))))) for p, n in sizes.items()}
        manifest = Manifest(files, tuple(sorted(directories)), HEADER)
        assert Manifest.decode(manifest.encode(), "here") == manifest

    def test_resources_are_sorted_and_include_directories(self) -> None:
        manifest = Manifest({"b/x": FileEntry(3, ("",)), "a": FileEntry(1, ("",))}, ("b/",), HEADER)
        assert list(manifest.resources.items()) == [("a", 1), ("b/", 0), ("b/x", 3)]

    def test_without_drops_directories_that_become_empty(self) -> None:
        files = {path: FileEntry(0, ()) for path in ("a/b/x", "a/y", "c/z")}
        manifest = Manifest(files, ("a/", "a/b/", "c/", "empty/"), HEADER)
        left = manifest.without(["a/b/x", "c/z"])
        assert left.resources == {"a/": 0, "a/y": 0, "empty/": 0}

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"version": 2}, CheckpointError, "upgrade"),
            ({"version": "1"}, CheckpointCorrupt, "TypeError"),
            ({"restart": "0"}, CheckpointCorrupt, "restart is '0'"),
            ({"files": None}, CheckpointCorrupt, "TypeError"),
            ({"chunk_size": 0}, CheckpointCorrupt, "chunk_size"),
            ({"directories": ["../x/"]}, CheckpointCorrupt, r"'\.\./x'"),
            ({"directories": [5]}, CheckpointCorrupt, "AttributeError"),
            ({"files": [{"path": "a"}]}, CheckpointCorrupt, "KeyError"),
            (
                {"files": [entry := {"path": "a", "size": 1, "algorithm": "crc", "digests": ["x"]}]},
                CheckpointError,
                "crc",
            ),
            ({"files": [{**entry, "algorithm": "xxh3_128", "digests": []}]}, CheckpointCorrupt, "0 digests"),
            ({"files": [{**entry, "algorithm": "xxh3_128", "size": -1}]}, CheckpointCorrupt, "size"),
            ({"files": [{**entry, "path": ".det_core/manifest.json"}]}, CheckpointCorrupt, "not a path in"),
        ],
    )
    def test_decode_of_invalid_manifest_is_rejected(
        self, change: dict[str, object], error: type[Exception], match: str
    ) -> None:
        body = {**earlier(Manifest({}, (), HEADER)), **change}
        with pytest.raises(error, match=match):
            Manifest.decode(json.dumps(body).encode(), "here")

    def test_manifest_of_earlier_version_without_own_digests_is_read(self) -> None:
        manifest = Manifest({"a": FileEntry(1, ("ab",))}, ("b/",), HEADER)
        data = orjson.dumps(earlier(manifest))
        assert b'"digest":' not in data
        assert Manifest.decode(data, "here") == manifest
        assert Header.parse_prefix(data, "here") == HEADER

    def test_manifest_with_any_flipped_bit_is_rejected_or_equal(self) -> None:
        manifest = Manifest({"a": FileEntry(3, ("ab",)), "b/c": FileEntry(0, ())}, ("b/", "d/"), HEADER)
        data, harmless = bytearray(manifest.encode()), 0
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            assert Header.parse_prefix(bytes(data), "here") in (HEADER, None), f"bit {bit}"
            try:
                assert Manifest.decode(bytes(data), "here") == manifest, f"bit {bit}: {data.decode()}"
                harmless += 1
            except CheckpointError:
                pass
            data[bit // 8] ^= 1 << bit % 8
        assert harmless <= 8 * len("digest"), "only a key that nobody looks for can change its name"

    @given(st.binary(max_size=40))
    def test_decode_of_random_bytes_is_corrupt(self, data: bytes) -> None:
        with pytest.raises(CheckpointCorrupt, match="here"):
            Manifest.decode(data, "here")


class TestOwner:
    def test_own_process_is_alive(self) -> None:
        owner = Owner.current("a run.with dots", 3)
        assert Owner.parse(f"some.id.{owner.tag}") == ("some.id", owner)
        assert not owner.is_dead()

    def test_owner_with_reused_pid_is_dead(self) -> None:
        owner = Owner.current("run", 0)
        assert replace(owner, started=owner.started - 1).is_dead()

    def test_owner_of_an_ended_child_is_dead(self) -> None:
        import subprocess
        import sys

        from det_core.storage._owner import _start_time

        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            owner = replace(Owner.current("run", 0), pid=child.pid, started=_start_time(child.pid) or 0)
            assert not owner.is_dead()
            child.kill()
            child.stdin.close()  # type: ignore[union-attr]
            while _start_time(child.pid) is not None:
                threading.Event().wait(0.01)
            assert owner.is_dead(), "a zombie writes no more"
        assert owner.is_dead()

    def test_only_a_later_restart_of_the_run_is_successor(self) -> None:
        away = replace(Owner.current("run", 1), host="0" * 12)
        assert not away.is_dead()
        assert not away.is_dead(Owner.current("run", 1))
        assert not away.is_dead(Owner.current("another", 2))
        assert away.is_dead(Owner.current("run", 2))

    @pytest.mark.parametrize("name", ["", "id", "a.b.c.d.e", "id.run.x.host.1.2", "deleted.1234"])
    def test_parse_of_other_names_returns_none(self, name: str) -> None:
        assert Owner.parse(name) is None


class TestThreads:
    @pytest.mark.parametrize("threads", [1, 4])
    def test_map_threads_returns_results_in_order(self, threads: int) -> None:
        assert map_threads(lambda n: n * n, range(50), threads) == [n * n for n in range(50)]

    def test_map_threads_starts_no_more_than_allowed(self) -> None:
        seen: set[int] = set()
        map_threads(lambda _: seen.add(threading.get_ident()), range(100), 3)
        assert len(seen) <= 3

    def test_map_threads_stops_at_the_first_error(self) -> None:
        begun: list[int] = []

        def work(n: int) -> None:
            begun.append(n)
            if n == 3:
                raise ArithmeticError(n)
            threading.Event().wait(0.001)

        with pytest.raises(ArithmeticError):
            map_threads(work, range(10_000), 2)
        assert len(begun) < 10_000

    def test_meter_reports_in_the_callers_thread(self) -> None:
        ticks: list[tuple[int, int]] = []
        meter = ProgressMeter(lambda done: ticks.append((done, threading.get_ident())))

        def work(_: int) -> None:
            meter.add(5)
            while not ticks:
                threading.Event().wait(0.01)

        map_threads(work, [1, 2], 2, meter)
        assert sum(done for done, _ in ticks) == 10 and {caller for _, caller in ticks} == {threading.get_ident()}

    def test_meter_that_raises_stops_the_other_threads(self) -> None:
        begun: list[int] = []

        def told(done: int) -> None:
            raise ArithmeticError

        meter = ProgressMeter(told)

        def work(n: int) -> None:
            begun.append(n)
            while True:  # until it is stopped
                meter.add(1)
                threading.Event().wait(0.01)

        with pytest.raises(ArithmeticError):
            map_threads(work, range(100), 2, meter)
        assert len(begun) == 2

    def test_map_threads_joins_its_threads(self) -> None:
        before = set(threading.enumerate())
        with pytest.raises(ZeroDivisionError):
            map_threads(lambda n: 1 // n, [1, 2, 0, 3], 4)
        assert set(threading.enumerate()) == before


class TestCopier:
    """Small chunks stand in for large files."""

    @pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 39, 40, 41, 95, 100])
    def test_copy_of_pieces_equals_the_file(self, size: int, tmp_path: Path) -> None:
        data = os.urandom(size)
        (tmp_path / "source").write_bytes(data)
        job = CopyTask("f", str(tmp_path / "source"), size, str(tmp_path / "target"))
        entry = Copier(Disk("here"), "here", chunk_size=10, seal=True).run([job])["f"]
        assert (tmp_path / "target").read_bytes() == data
        from xxhash import xxh3_128_hexdigest

        assert entry == FileEntry(size, tuple(xxh3_128_hexdigest(data[i : i + 10]) for i in range(0, size, 10)))
        checked = job._replace(target=None, expected=entry.digests)
        assert Copier(Disk("here"), "here", chunk_size=10).run([checked])["f"] == entry

    def test_copier_compares_each_chunk(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(bytes(95))
        job = CopyTask("f", str(tmp_path / "source"), 95)
        digests = Copier(Disk("here"), "here", chunk_size=10).run([job])["f"].digests
        assert digests is not None
        for position in range(95):
            (tmp_path / "source").write_bytes(bytes(position) + b"x" + bytes(94 - position))
            start = position // 10 * 10
            with pytest.raises(CheckpointCorrupt, match=f"f differs .* byte {start} and {min(95, start + 10)}"):
                Copier(Disk("here"), "here", chunk_size=10).run([job._replace(expected=digests)])

    def test_copier_progress_that_raises_stops_within_a_file(self, tmp_path: Path) -> None:
        size, chunk = 64 << 20, 1 << 20
        for name in "ab":
            with (tmp_path / name).open("wb") as f:
                f.truncate(size)
        seen: list[int] = []

        def progress(done: int) -> None:
            seen.append(done)
            raise ArithmeticError("enough")

        class Slow(Disk):
            read = 0

            def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
                if operation == "read":
                    threading.Event().wait(0.01)
                    self.read += 1
                return super().do(operation, path, function, *args)

        jobs = [CopyTask(name, str(tmp_path / name), size, str(tmp_path / f"{name}-copy")) for name in "ab"]
        disk = Slow("here")
        with pytest.raises(ArithmeticError, match="enough"):
            Copier(disk, "here", chunk_size=chunk, progress=progress).run(jobs)
        assert len(seen) == 1 and 0 < seen[0] < size
        assert disk.read < 2 * size // (128 << 10) // 4, "it went on to the end"

    @pytest.mark.parametrize("listed", [3, 6])
    def test_copier_with_changed_size_raises(self, listed: int, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(b"12345")
        with pytest.raises(CheckpointError, match=f"{tmp_path}/source was changed while it was copied"):
            Copier(Disk("here"), "here").run(
                [CopyTask("f", str(tmp_path / "source"), listed, str(tmp_path / "target"))]
            )

    def test_copier_of_a_growing_file_copies_its_beginning(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(b"12345")
        job = CopyTask("f", str(tmp_path / "source"), 3, str(tmp_path / "target"))
        Copier(Disk("here"), "here", growing=True).run([job])
        assert (tmp_path / "target").read_bytes() == b"123"

    @given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 9))
    def test_split_work_is_a_partition(self, sizes: list[int], parts: int) -> None:
        work = pieces([CopyTask(str(i), "", size) for i, size in enumerate(sizes)], 10)
        shares = [split_work(work, part, parts, 10) for part in range(parts)]
        assert [piece for one in shares for piece in one] == work
        assert max(map(len, shares)) <= -(-len(work) // parts) + 1


class TestScan:
    @given(st.sets(PATH, max_size=12))
    def test_scan_lists_files_and_directories(self, paths: set[str]) -> None:
        import tempfile

        paths = {path for path in paths if len(path.encode()) < 200 and not path.startswith("metadata.json")}
        with tempfile.TemporaryDirectory() as folder:
            made = set()
            for path in sorted(paths, key=len):
                try:
                    Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                    Path(folder, path).write_bytes(b"x")
                except (FileExistsError, NotADirectoryError, IsADirectoryError):
                    continue
                made.add(path)
            listing = scan(Disk("here"), folder)
            assert set(listing.files) == made
            assert {d for p in made for d in parents(p)} <= set(listing.directories)

    def test_scan_of_unreadable_directory_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"here: cannot list .*nothing"):
            scan(Disk("here"), str(tmp_path / "nothing"))


class TestMetadata:
    @given(st.dictionaries(st.text(), st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )))  # fmt: skip
    def test_metadata_round_trips(self, metadata: dict[str, Any]) -> None:
        assert decode_metadata(encode_metadata(metadata), "here") == metadata

    def test_metadata_has_one_key_per_line(self) -> None:
        data = encode_metadata({"steps_completed": 3, "name": "ä", "more": {"a": [1, float("inf")]}})
        lines = ["{", '  "steps_completed": 3,', '  "name": "\\u00e4",', '  "more": {"a": [1, Infinity]}', "}"]
        assert data.decode().splitlines() == lines
        assert encode_metadata({}) == b"{}"


class TestDisk:
    def test_remove_tree_of_a_directory_that_refills_retries(self, tmp_path: Path) -> None:
        class Nfs(Disk):
            """Shows a removed file under another name, once."""

            shown = False

            def remove_file(self, path: str) -> None:
                super().remove_file(path)
                if not self.shown:
                    self.shown = True
                    Path(path).with_name(".nfs0001").write_text("x")

        (tmp_path / "folder" / "sub").mkdir(parents=True)
        (tmp_path / "folder" / "sub" / "file").write_text("x")
        Nfs("here").remove_tree(str(tmp_path / "folder"))
        assert not (tmp_path / "folder").exists()

    def test_remove_tree_of_a_directory_that_never_empties_raises(self, tmp_path: Path) -> None:
        class Full(Disk):
            def remove_file(self, path: str) -> None:
                """Remove nothing."""

        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("x")
        with pytest.raises(StorageError, match="remove folder"):
            Full("here").remove_tree(str(tmp_path / "folder"))

    def test_remove_of_a_missing_file_is_not_an_error(self, tmp_path: Path) -> None:
        Disk("here").remove_tree(str(tmp_path / "gone"))
        Disk("here").remove_file(str(tmp_path / "gone"))
