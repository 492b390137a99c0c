"""Copies of event files: what is copied, where to, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from det_core.core._tensorboard._sync import Copies, copies_in
from det_core.errors import TensorboardError
from det_core.storage import DirectoryStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name in ("events.1", "sub/events.2", "sub/notes.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_all_files_are_copied_under_their_own_names(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert copies_in(to).upload(source, 0) == ["events.1", "sub/events.2", "sub/notes.txt"]
    assert files(to) == files(source)


def test_the_selector_chooses_and_the_mangler_renames_by_rank(source: Path, tmp_path: Path) -> None:
    seen: list[Path] = []

    def selector(path: Path) -> bool:
        seen.append(path)
        return path.suffix != ".txt"

    copied = copies_in(tmp_path / "to").upload(source, 3, selector, lambda path, rank: Path(f"rank{rank}") / path)
    assert seen == [Path("events.1"), Path("sub/events.2"), Path("sub/notes.txt")]
    assert copied == ["rank3/events.1", "rank3/sub/events.2"]
    assert files(tmp_path / "to") == {"rank3/events.1": "events.1", "rank3/sub/events.2": "sub/events.2"}


def test_a_folder_that_is_not_there_holds_no_files(tmp_path: Path) -> None:
    assert copies_in(tmp_path / "to").upload(tmp_path / "none", 0) == []
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("target", ["../out", "a/../../out", "/tmp/out", "..", ".", "a/.."])
def test_a_name_that_leaves_the_destination_is_refused_before_anything_is_copied(
    source: Path, tmp_path: Path, target: str
) -> None:
    def mangler(path: Path, rank: int) -> Path:
        return Path(target) if path.name == "notes.txt" else path

    with pytest.raises(ValueError, match=r"for 'sub/notes\.txt': expected a path inside the destination"):
        copies_in(tmp_path / "to").upload(source, 0, mangler=mangler)
    assert not (tmp_path / "to").exists()


def test_two_files_of_one_name_are_refused_before_anything_is_copied(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'same' for both 'events\.1' and 'sub/events\.2'"):
        copies_in(tmp_path / "to").upload(source, 0, mangler=lambda path, rank: Path("same"))
    assert not (tmp_path / "to").exists()


def test_an_older_copy_is_replaced_and_nothing_lies_beside_it(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "events.1").write_text("an older and longer text")
    copies_in(to).upload(source, 0)
    assert files(to) == files(source)


def test_a_destination_that_cannot_be_written_is_named_and_keeps_what_it_had(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    (to / "sub").write_text("a file where a folder is needed")
    with pytest.raises(TensorboardError, match=r"copying .*sub/events\.2 to .*to/sub/events\.2"):
        copies_in(to).upload(source, 0)
    assert files(to) == {"events.1": "events.1", "sub": "a file where a folder is needed"}


def test_sync_copies_only_what_changed(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    copies = copies_in(to)
    assert len(copies.sync(source)) == 3
    assert copies.sync(source) == []
    with open(source / "events.1", "a") as file:
        file.write("+")
    assert copies.sync(source) == ["events.1"]
    stat = (source / "sub/events.2").stat()
    os.utime(source / "sub/events.2", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert copies.sync(source) == ["sub/events.2"]
    assert len(copies_in(to).sync(source)) == 3, "who does not know what was copied copies all"
    assert files(to) == files(source)


def test_what_could_not_be_copied_is_tried_again(source: Path) -> None:
    came: list[str] = []

    def put(path: Path, name: str) -> None:
        came.append(name)
        if came == ["events.1", "sub/events.2"]:
            raise OSError(28, "No space left on device")

    copies = Copies(put, "s3://b")
    with pytest.raises(TensorboardError, match=r"sub/events\.2 to s3://b/sub/events\.2: No space left"):
        copies.sync(source)
    assert copies.sync(source) == ["sub/events.2", "sub/notes.txt"]


def test_a_store_keeps_them_beside_its_checkpoints(source: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    copies = Copies(lambda path, name: store.put_beside(path, f"tensorboard/run/{name}"), store.root)
    assert len(copies.sync(source)) == 3
    assert files(tmp_path / "store/tensorboard/run") == files(source)
    assert store.list() == []
    (tmp_path / "store/tensorboard/run/sub/notes.txt").unlink()
    (tmp_path / "store/tensorboard/run/sub/notes.txt").mkdir()
    (source / "sub/notes.txt").write_text("changed")
    with pytest.raises(TensorboardError, match=r"copying .*notes\.txt to .*cannot rename"):
        copies.sync(source)


def test_links_to_nothing_and_copies_under_way_are_left_out(source: Path, tmp_path: Path) -> None:
    (source / "gone").symlink_to(tmp_path / "nowhere")
    (source / "alias").symlink_to(source / "events.1")
    (source / ".events.1.77.part").write_text("half")
    assert copies_in(tmp_path / "to").sync(source) == ["alias", "events.1", "sub/events.2", "sub/notes.txt"]
    assert not (tmp_path / "to" / "alias").is_symlink()
