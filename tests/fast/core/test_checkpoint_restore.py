"""Getting checkpoints back: download, restore_path, metadata, and what is damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointContext, DownloadMode
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, DetCoreError, StorageError
from det_core.storage import DirectoryStore, Disk
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, listed, tree
from support.threads import as_ranks

NO = DownloadMode.NoSharedDownload
MODES = list(DownloadMode)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """Return the ID of a checkpoint with ``FILES``."""
    with alone() as distributed:
        return Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source"), STEPS)


@pytest.fixture
def metadata_json() -> bytes:
    return b'{\n  "steps_completed": 3\n}'


class CountingDisk(Disk):
    """Remembers which files were opened to be read, and how many bytes came."""

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.opened_files: list[str] = []
        self.read = 0

    def do(self, operation: str, path: str, function: Callable[..., Any], *args: Any) -> Any:
        result = super().do(operation, path, function, *args)
        if operation == "open" and not args[1] & os.O_WRONLY:
            self.opened_files.append(os.path.basename(path))
        if function in (os.preadv, os.readv):
            self.read += result
        return result


@pytest.mark.parametrize("mode", MODES)
def test_download_copies_all(
    context: CheckpointContext, mode: DownloadMode, stored: str, metadata_json: bytes, tmp_path: Path
) -> None:
    context.download(stored, tmp_path / "a" / "new" / "folder", mode)
    assert tree(tmp_path / "a" / "new" / "folder") == {**FILES, "metadata.json": metadata_json}
    assert not (tmp_path / "a" / "new" / "folder" / ".det_core").exists()
    assert [path.name for path in (tmp_path / "a" / "new").iterdir()] == ["folder"]


@pytest.mark.parametrize("mode", MODES)
def test_download_into_a_folder_that_is_there(
    context: CheckpointContext, mode: DownloadMode, stored: str, tmp_path: Path
) -> None:
    fill(tmp_path / "out", {"sub/mine": b"mine", "model.pt": b"an older one", "rng": b"r"})
    context.download(stored, tmp_path / "out", mode, selector=lambda path: path != "metadata.json")
    assert tree(tmp_path / "out") == {**FILES, "sub/mine": b"mine"}
    damage(tmp_path / "store" / stored / "rng")
    before = tree(tmp_path / "out")
    with pytest.raises(CheckpointCorrupt, match="rng"):
        context.download(stored, tmp_path / "out", mode)
    assert tree(tmp_path / "out") == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not a folder"):
        context.download(stored, tmp_path / "file", mode)


@pytest.mark.parametrize("way", ["file for folder", "folder for file", "link elsewhere"])
def test_download_that_something_is_in_the_way_of_changes_nothing(
    context: CheckpointContext, stored: str, way: str, tmp_path: Path
) -> None:
    target = fill(tmp_path / "out", {"model.pt": b"an older one", "rng": b"older"})
    elsewhere = fill(tmp_path / "elsewhere", {"optimizer.pt": b"mine"})
    if way == "file for folder":
        (target / "sub").write_text("mine")
    elif way == "folder for file":
        fill(target / "sub" / "optimizer.pt", {"mine": b"mine"})
    else:
        (target / "sub").symlink_to(elsewhere)
    before = tree(target)
    with pytest.raises(ValueError, match=f"{target}/sub.*: remove it, or name another folder"):
        context.download(stored, target)
    assert tree(target) == before and tree(elsewhere) == {"optimizer.pt": b"mine"}
    context.download(stored, target, selector=lambda path: not path.startswith("sub"))
    assert (target / "rng").read_bytes() == FILES["rng"]


@pytest.mark.parametrize("mode", MODES)
def test_a_selector_says_what_is_copied(
    context: CheckpointContext, mode: DownloadMode, stored: str, tmp_path: Path
) -> None:
    asked: list[str] = []

    def selector(path: str) -> bool:
        asked.append(path)
        return path.startswith("sub/deep/")

    context.download(stored, tmp_path / "out", mode, selector=selector)
    assert tree(tmp_path / "out") == {"sub/deep/empty": b""}
    assert sorted(asked) == sorted([*FILES, "metadata.json", "sub/", "sub/deep/"])


def test_a_failing_selector_is_an_error(context: CheckpointContext, stored: str, tmp_path: Path) -> None:
    def selector(path: str) -> bool:
        raise ArithmeticError(path)

    with pytest.raises(ArithmeticError):
        context.download(stored, tmp_path / "out", selector=selector)
    with pytest.raises(ArithmeticError), context.restore_path(stored, selector=selector):
        pass


@pytest.mark.parametrize("mode", MODES)
def test_restore_path_is_the_stored_folder(mode: DownloadMode, stored: str, tmp_path: Path) -> None:
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store")
        with context.restore_path(stored, mode) as path:
            assert path == tmp_path / "store" / stored
            assert recorder.restores == [(stored, 3)]
        with context.restore_path(stored, mode):
            pass
    assert recorder.restores == [(stored, 3)], "a process tells of a restore once"
    assert listed(tmp_path / "store") == [stored]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_is_marked_as_in_use(mode: DownloadMode, stored: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "store")
        with pytest.raises(ArithmeticError), context.restore_path(stored, mode):
            assert store.in_use() == {stored}
            raise ArithmeticError
        assert store.in_use() == set()

        def selector(path: str) -> bool:
            assert store.in_use() == {stored}
            return True

        context.download(stored, tmp_path / "out", mode, selector=selector)
        assert store.in_use() == set()
        damage(tmp_path / "store" / stored / "rng")
        with pytest.raises(CheckpointCorrupt), Recorder().context(distributed, tmp_path / "store").restore_path(stored):
            pass
        assert store.in_use() == set()


@pytest.mark.parametrize("mode", MODES)
def test_digests_are_checked_once_and_sizes_every_time(mode: DownloadMode, stored: str, tmp_path: Path) -> None:
    with alone() as distributed:
        disk = CountingDisk("here")
        context = Recorder().context(distributed, tmp_path / "store", disk=disk)
        with context.restore_path(stored, mode, selector=lambda path: path == "rng"):
            assert disk.read == len(FILES["rng"])
        with context.restore_path(stored, mode):
            total = sum(map(len, FILES.values())) + os.path.getsize(tmp_path / "store" / stored / "metadata.json")
            assert disk.read == total
        with context.restore_path(stored, mode):
            assert disk.read == total
        os.truncate(tmp_path / "store" / stored / "model.pt", 5)
        with pytest.raises(CheckpointCorrupt, match=r"model.pt has 5 bytes"), context.restore_path(stored, mode):
            pass


@pytest.mark.parametrize(("path", "mode"), [("model.pt", MODES[0]), ("rng", MODES[1]), ("metadata.json", MODES[0])])
def test_a_flipped_byte_is_found(mode: DownloadMode, path: str, stored: str, tmp_path: Path) -> None:
    damage(tmp_path / "store" / stored / path)
    recorder = Recorder()
    with alone() as distributed:
        context = recorder.context(distributed, tmp_path / "store")
        with pytest.raises(CheckpointCorrupt, match=path), context.restore_path(stored, mode):
            pass
        with pytest.raises(CheckpointCorrupt, match=path):
            context.download(stored, tmp_path / "out", mode)
        assert not (tmp_path / "out" / path).exists()
        with context.restore_path(stored, mode, selector=lambda name: name != path):
            pass
        context.download(stored, tmp_path / "out", mode, selector=lambda name: name != path)
    assert recorder.restores == [(stored, 3)]


def test_a_file_that_became_a_link_elsewhere_is_found(context: CheckpointContext, stored: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(FILES["rng"])
    (tmp_path / "store" / stored / "rng").unlink()
    (tmp_path / "store" / stored / "rng").symlink_to(tmp_path / "elsewhere")
    os.rename(tmp_path / "store" / stored / "sub", tmp_path / "sub")
    for name in ("rng", "sub/optimizer.pt"):
        with pytest.raises(CheckpointCorrupt, match=r"rng is a link|optimizer.pt is missing"):
            context.download(stored, tmp_path / "out", selector=lambda path, name=name: path == name)  # type: ignore[misc]
    (tmp_path / "store" / stored / "sub").symlink_to(tmp_path / "sub")
    with pytest.raises(CheckpointCorrupt, match=r"sub/ is a link to .*outside of it"):
        context.download(stored, tmp_path / "out", selector=lambda path: path == "sub/optimizer.pt")


def test_get_metadata(context: CheckpointContext, stored: str, tmp_path: Path) -> None:
    assert context.get_metadata(stored) == STEPS
    damage(tmp_path / "store" / stored / "metadata.json")
    with pytest.raises(CheckpointCorrupt, match=r"metadata.json"):
        context.get_metadata(stored)


def test_a_users_own_metadata_json_gives_way(context: CheckpointContext, tmp_path: Path) -> None:
    source = fill(tmp_path / "source", {"metadata.json": b"mine", "sub/metadata.json": b"kept", ".det_core/x": b"x"})
    uploaded = context.upload(source, STEPS)
    with context.store_path(STEPS) as (path, written):
        fill(path, {"metadata.json": b"mine", "sub/metadata.json": b"kept", ".det_core/manifest.json": b"x"})
    for storage_id in (uploaded, written):
        assert context.get_metadata(storage_id) == STEPS
        assert set(tree(tmp_path / "store" / storage_id)) == {"metadata.json", "sub/metadata.json"}
    assert tree(source)["metadata.json"] == b"mine"
    assert sorted(listed(tmp_path / "store")) == sorted([uploaded, written])


def test_what_was_restored_can_be_stored_again(context: CheckpointContext, stored: str, tmp_path: Path) -> None:
    with context.restore_path(stored) as path:
        again = context.upload(path, {"steps_completed": 9})
    with context.restore_path(again) as path:
        assert tree(path) == {**FILES, "metadata.json": b'{\n  "steps_completed": 9\n}'}
    assert DirectoryStore(tmp_path / "store").list("run")[-1].storage_id in (stored, again)


class TestWrittenByOthers:
    """A folder in the store that has files, and no manifest."""

    @pytest.fixture
    def foreign(self, tmp_path: Path) -> str:
        fill(tmp_path / "store" / "theirs", {**FILES, "metadata.json": b'{"steps_completed": 12, "x": 1}'})
        (tmp_path / "store" / "theirs" / "latest").symlink_to("rng")
        return "theirs"

    @pytest.mark.parametrize("mode", MODES)
    def test_it_is_read_and_said_to_be_unverified(
        self, mode: DownloadMode, foreign: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = Recorder()
        with alone() as distributed, caplog.at_level(logging.WARNING):
            context = recorder.context(distributed, tmp_path / "store")
            assert context.get_metadata(foreign) == {"steps_completed": 12, "x": 1}
            context.download(foreign, tmp_path / "out", mode)
            with context.restore_path(foreign, mode) as path:
                assert tree(path) == tree(tmp_path / "out")
        assert tree(tmp_path / "out")["latest"] == FILES["rng"]
        assert recorder.restores == [(foreign, 12)]
        assert "theirs" in caplog.text and "unverified" in caplog.text
        assert listed(tmp_path / "store") == []

    def test_without_metadata(self, tmp_path: Path) -> None:
        fill(tmp_path / "store" / "bare", {"x": b"x"})
        fill(tmp_path / "store" / "odd", {"x": b"x", "metadata.json": b"no json"})
        recorder = Recorder()
        with alone() as distributed:
            context = recorder.context(distributed, tmp_path / "store")
            assert context.get_metadata("bare") == {}
            for name in ("bare", "odd"):
                with context.restore_path(name):
                    pass
            with pytest.raises(CheckpointCorrupt, match="not valid JSON"):
                context.get_metadata("odd")
        assert recorder.restores == [("bare", None), ("odd", None)]

    def test_a_link_out_of_it_is_refused(self, context: CheckpointContext, foreign: str, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "store" / foreign / "out").symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointCorrupt, match="outside the directory"):
            context.download(foreign, tmp_path / "out")

    def test_it_is_deleted_by_id(self, foreign: str, tmp_path: Path) -> None:
        with alone() as distributed:
            Recorder().context(distributed, tmp_path / "store").delete(foreign)
        assert not (tmp_path / "store" / foreign).exists()


class TestDelete:
    """``checkpoint.delete()``."""

    def test_it_is_gone_and_told_of(self, stored: str, tmp_path: Path) -> None:
        recorder = Recorder()
        with alone() as distributed:
            context = recorder.context(distributed, tmp_path / "store")
            with context.restore_path(stored):
                pass
            context.delete(stored)
            context.delete(stored)
            with pytest.raises(CheckpointNotFound):
                context.get_metadata(stored)
        assert recorder.gone == [(stored, {}), (stored, {})]
        assert [p.name for p in (tmp_path / "store").iterdir()] == [".det_core-tmp"]

    def test_any_rank_may(self, stored: str, tmp_path: Path) -> None:
        def work(distributed: core.DistributedContext) -> None:
            if distributed.rank == 1:
                Recorder().context(distributed, tmp_path / "store").delete(stored)

        as_ranks(2, work)
        assert listed(tmp_path / "store") == []

    def test_a_link_is_removed_and_not_what_it_leads_to(self, tmp_path: Path) -> None:
        fill(tmp_path / "elsewhere")
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "link").symlink_to(tmp_path / "elsewhere")
        with alone() as distributed:
            Recorder().context(distributed, tmp_path / "store").delete("link")
        assert tree(tmp_path / "elsewhere") == FILES
        assert not (tmp_path / "store" / "link").is_symlink()

    def test_links_in_a_checkpoint_are_not_followed(self, stored: str, tmp_path: Path) -> None:
        fill(tmp_path / "elsewhere")
        (tmp_path / "store" / stored / "link").symlink_to(tmp_path / "elsewhere")
        with alone() as distributed:
            Recorder().context(distributed, tmp_path / "store").delete(stored)
        assert tree(tmp_path / "elsewhere") == FILES


class TestRanks:
    """Ranks that restore together."""

    def each(self, size: int, tmp_path: Path, work: Callable[[CheckpointContext, int], Any]) -> list[Any]:
        """Return the results or errors of each rank."""

        def run(distributed: core.DistributedContext) -> Any:
            self.disks[distributed.rank] = CountingDisk("here")
            context = Recorder().context(distributed, tmp_path / "store", disk=self.disks[distributed.rank])
            try:
                return work(context, distributed.rank)
            except DetCoreError as e:
                return e

        self.disks: dict[int, CountingDisk] = {}
        return as_ranks(size, run)

    def test_they_share_a_download(self, tmp_path: Path) -> None:
        files = {f"f{i}": b"%d" % i * 1000 for i in range(20)}
        with alone() as distributed:
            storage_id = (
                Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source", files), STEPS)
            )

        def work(context: CheckpointContext, rank: int) -> dict[str, bytes]:
            context.download(storage_id, tmp_path / "out")
            return tree(tmp_path / "out")

        for found in self.each(3, tmp_path, work):
            found.pop("metadata.json")
            assert found == files, "a rank returned before all was there"
        opened = [[n for n in disk.opened_files if n in files] for disk in self.disks.values()]
        assert sorted(n for names in opened for n in names) == sorted(files), "each file is read once"
        assert all(len(names) >= 5 for names in opened)

    def test_download_that_fails_on_one_rank_is_taken_back_by_all(self, stored: str, tmp_path: Path) -> None:
        older = dict.fromkeys(FILES, b"older")
        fill(tmp_path / "out", older)

        def work(context: CheckpointContext, rank: int) -> None:
            disk = self.disks[rank]
            if rank == 1:
                do = disk.do

                def full(operation: str, path: str, *args: Any) -> Any:
                    if operation == "rename" and "/.det_core/" not in args[1]:
                        raise disk.error(operation, path, OSError(5, "Input/output error"))
                    return do(operation, path, *args)

                disk.do = full  # type: ignore[method-assign,assignment]
            context.download(stored, tmp_path / "out")

        found = self.each(2, tmp_path, work)
        assert all(isinstance(error, StorageError) for error in found)
        assert tree(tmp_path / "out") == older

    def test_ranks_with_folders_of_their_own_get_all(self, stored: str, tmp_path: Path) -> None:
        self.each(3, tmp_path, lambda context, rank: context.download(stored, tmp_path / f"out{rank // 2}"))
        for name in ("out0", "out1"):
            assert set(tree(tmp_path / name)) == {*FILES, "metadata.json"}

    def test_what_any_selects_is_copied(self, stored: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> None:
            wanted = ["model.pt", "rng", "none of them"][rank]
            context.download(stored, tmp_path / "out", selector=lambda path: path == wanted)

        self.each(3, tmp_path, work)
        assert set(tree(tmp_path / "out")) == {"model.pt", "rng"}

    def test_a_rank_without_selector_wants_all(self, stored: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> None:
            context.download(stored, tmp_path / "out", selector=None if rank else lambda path: path == "rng")

        self.each(2, tmp_path, work)
        assert set(tree(tmp_path / "out")) == {*FILES, "metadata.json"}

    def test_they_share_the_check_of_a_restore(self, tmp_path: Path) -> None:
        files = {f"f{i}": b"%d" % (i % 10) * 5000 for i in range(30)}
        with alone() as distributed:
            storage_id = (
                Recorder().context(distributed, tmp_path / "store").upload(fill(tmp_path / "source", files), STEPS)
            )

        def work(context: CheckpointContext, rank: int) -> Path:
            for _ in range(2):
                with context.restore_path(storage_id) as path:
                    pass
            return path

        assert set(self.each(3, tmp_path, work)) == {tmp_path / "store" / storage_id}
        opened = [[n for n in disk.opened_files if n in files] for disk in self.disks.values()]
        assert sorted(n for names in opened for n in names) == sorted(files), "each file is read once in the job"
        assert all(len(names) >= 8 for names in opened)

    @pytest.mark.parametrize(("path", "call"), [("model.pt", "download"), ("rng", "restore_path")])
    def test_damage_is_told_to_every_rank(self, call: str, path: str, stored: str, tmp_path: Path) -> None:
        damage(tmp_path / "store" / stored / path)

        def work(context: CheckpointContext, rank: int) -> None:
            if call == "download":
                context.download(stored, tmp_path / "out")
            else:
                with context.restore_path(stored):
                    raise AssertionError("the block was entered")

        for error in self.each(3, tmp_path, work):
            assert isinstance(error, CheckpointCorrupt)
            assert path in str(error)

    @pytest.mark.parametrize("call", ["download", "restore_path"])
    def test_an_unknown_id_is_told_to_every_rank(self, call: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> None:
            if call == "download":
                context.download("gone", tmp_path / "out")
            else:
                with context.restore_path("gone"):
                    raise AssertionError("the block was entered")

        for error in self.each(3, tmp_path, work):
            assert isinstance(error, CheckpointNotFound)
            assert "'gone'" in str(error)

    def test_a_selector_that_fails_on_one_rank_is_told_to_all(self, stored: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> Any:
            try:
                context.download(stored, tmp_path / "out", selector=(lambda path: 1 / 0 > 0) if rank == 1 else None)
            except ZeroDivisionError as e:
                return e

        errors = self.each(2, tmp_path, work)
        assert isinstance(errors[1], ZeroDivisionError)
        assert isinstance(errors[0], CheckpointError) and "rank 1: ZeroDivisionError" in str(errors[0])

    def test_ranks_that_ask_for_different_checkpoints_are_told(self, stored: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> str:
            with pytest.raises(ValueError) as caught:
                context.download(stored if rank else "another", tmp_path / "out")
            return str(caught.value)

        for message in self.each(2, tmp_path, work):
            assert "different checkpoints" in message and stored in message and "another" in message

    def test_no_shared_download_needs_nobody(self, stored: str, tmp_path: Path) -> None:
        def work(context: CheckpointContext, rank: int) -> None:
            if rank == 1:
                context.download(stored, tmp_path / "out", NO)
                with context.restore_path(stored, NO) as path:
                    assert tree(path).keys() == tree(tmp_path / "out").keys()

        assert self.each(2, tmp_path, work) == [None, None]
        assert set(tree(tmp_path / "out")) == {*FILES, "metadata.json"}


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
