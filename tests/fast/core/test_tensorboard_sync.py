"""Copies of event files: what is copied, where to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from det_core import client, core
from det_core.errors import TensorboardError

MANUAL = core.TensorboardMode.MANUAL


@pytest.fixture
def ctx() -> Iterator[core.Context]:
    """Open a run with checkpoints in its own directory, and files beside its event files."""
    with core.init(tensorboard_mode=MANUAL) as made:
        for name in ("events.1", "sub/events.2", "sub/notes.txt"):
            path = made.train.get_tensorboard_path() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        yield made


@pytest.fixture
def uploaded(ctx: core.Context) -> Path:
    return Path(client.run(ctx.run_id).path, "tensorboard", "uploaded")


@pytest.fixture
def synced(tmp_path: Path) -> Iterator[tuple[Callable[[], None], Path, Path]]:
    """``sync_tensorboard()`` of a run with a storage, the run's folder, and where its files are kept."""
    with core.init(tensorboard_mode=MANUAL, checkpoint_storage=tmp_path / "store") as ctx:
        source = ctx.train.get_tensorboard_path()
        (source / "sub").mkdir()
        for name in ("a", "sub/b", "sub/c"):
            (source / name).write_text(name)
        yield ctx.train.sync_tensorboard, source, tmp_path / "store" / "tensorboard" / ctx.run_id


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_all_files_are_copied_under_their_own_names(ctx: core.Context, uploaded: Path) -> None:
    ctx.train.upload_tensorboard_files()
    assert files(uploaded) == {name: name for name in ("events.1", "sub/events.2", "sub/notes.txt")}


def test_the_selector_chooses_and_the_mangler_renames_by_rank(ctx: core.Context, uploaded: Path) -> None:
    seen: list[Path] = []

    def selector(path: Path) -> bool:
        seen.append(path)
        return path.suffix != ".txt"

    ctx.train.upload_tensorboard_files(selector, lambda path, rank: Path(f"rank{rank}") / path)
    assert seen == [Path("events.1"), Path("sub/events.2"), Path("sub/notes.txt")]
    assert files(uploaded) == {"rank0/events.1": "events.1", "rank0/sub/events.2": "sub/events.2"}


@pytest.mark.parametrize("target", ["../out", "a/../../out", "/tmp/out", "..", ".", "a/.."])
def test_a_name_that_leaves_the_destination_is_refused_before_anything_is_copied(
    ctx: core.Context, uploaded: Path, target: str
) -> None:
    def mangler(path: Path, rank: int) -> Path:
        return Path(target) if path.name == "notes.txt" else path

    with pytest.raises(ValueError, match=r"for 'sub/notes\.txt': expected a path inside the destination"):
        ctx.train.upload_tensorboard_files(mangler=mangler)
    assert not uploaded.exists()


def test_two_files_of_one_name_are_refused_before_anything_is_copied(ctx: core.Context, uploaded: Path) -> None:
    with pytest.raises(ValueError, match=r"'same' for both 'events\.1' and 'sub/events\.2'"):
        ctx.train.upload_tensorboard_files(mangler=lambda path, rank: Path("same"))
    assert not uploaded.exists()


def test_an_older_copy_is_replaced_and_nothing_lies_beside_it(ctx: core.Context, uploaded: Path) -> None:
    uploaded.mkdir()
    (uploaded / "events.1").write_text("an older and longer text")
    ctx.train.upload_tensorboard_files()
    assert files(uploaded) == files(ctx.train.get_tensorboard_path())


def test_a_destination_that_cannot_be_written_is_named_and_keeps_what_it_had(ctx: core.Context, uploaded: Path) -> None:
    uploaded.mkdir()
    (uploaded / "sub").write_text("a file where a folder is needed")
    with pytest.raises(TensorboardError, match=r"copying .*sub/events\.2 to .*uploaded/sub/events\.2"):
        ctx.train.upload_tensorboard_files()
    assert files(uploaded) == {"events.1": "events.1", "sub": "a file where a folder is needed"}


def test_sync_copies_only_what_changed(synced: tuple[Callable[[], None], Path, Path]) -> None:
    sync, source, kept = synced
    sync()
    assert files(kept) == files(source)
    for name in ("a", "sub/b"):
        (kept / name).unlink()
    sync()
    assert files(kept) == {"sub/c": "sub/c"}, "known to have been copied"
    with open(source / "a", "a") as file:
        file.write("+")
    sync()
    assert files(kept) == {"a": "a+", "sub/c": "sub/c"}


def test_what_could_not_be_copied_is_tried_again(synced: tuple[Callable[[], None], Path, Path]) -> None:
    sync, source, kept = synced
    (kept / "sub" / "b").mkdir(parents=True)
    with pytest.raises(TensorboardError, match=r"copying .*sub/b to .*sub/b: "):
        sync()
    assert files(kept) == {"a": "a"}
    (kept / "sub" / "b").rmdir()
    sync()
    assert files(kept) == files(source)


def test_links_to_nothing_and_copies_under_way_are_left_out(
    synced: tuple[Callable[[], None], Path, Path], tmp_path: Path
) -> None:
    sync, source, kept = synced
    (source / "gone").symlink_to(tmp_path / "nowhere")
    (source / "alias").symlink_to(source / "a")
    (source / ".a.77.part").write_text("half")
    sync()
    assert files(kept) == {"a": "a", "alias": "a", "sub/b": "sub/b", "sub/c": "sub/c"}
    assert not (kept / "alias").is_symlink()
