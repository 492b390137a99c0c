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


def test_upload_copies_all_files_under_their_names(ctx: core.Context, uploaded: Path) -> None:
    ctx.train.upload_tensorboard_files()
    assert files(uploaded) == {name: name for name in ("events.1", "sub/events.2", "sub/notes.txt")}


def test_upload_selects_and_renames_files(ctx: core.Context, uploaded: Path) -> None:
    seen: list[Path] = []

    def selector(path: Path) -> bool:
        seen.append(path)
        return path.suffix != ".txt"

    ctx.train.upload_tensorboard_files(selector, lambda path, rank: Path(f"rank{rank}") / path)
    assert seen == [Path("events.1"), Path("sub/events.2"), Path("sub/notes.txt")]
    assert files(uploaded) == {"rank0/events.1": "events.1", "rank0/sub/events.2": "sub/events.2"}


@pytest.mark.parametrize("target", ["../out", "a/../../out", "/tmp/out", "..", ".", "a/.."])
def test_upload_path_outside_destination_is_rejected_before_copying(
    ctx: core.Context, uploaded: Path, target: str
) -> None:
    def mangler(path: Path, rank: int) -> Path:
        return Path(target) if path.name == "notes.txt" else path

    with pytest.raises(ValueError, match=r"for 'sub/notes\.txt': expected a path inside the destination"):
        ctx.train.upload_tensorboard_files(mangler=mangler)
    assert not uploaded.exists()


def test_upload_duplicate_name_is_rejected_before_copying(ctx: core.Context, uploaded: Path) -> None:
    with pytest.raises(ValueError, match=r"'same' for both 'events\.1' and 'sub/events\.2'"):
        ctx.train.upload_tensorboard_files(mangler=lambda path, rank: Path("same"))
    assert not uploaded.exists()


def test_upload_replaces_older_copy(ctx: core.Context, uploaded: Path) -> None:
    uploaded.mkdir()
    (uploaded / "events.1").write_text("an older and longer text")
    ctx.train.upload_tensorboard_files()
    assert files(uploaded) == files(ctx.train.get_tensorboard_path())


def test_upload_unwritable_destination_is_named(ctx: core.Context, uploaded: Path) -> None:
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


def test_sync_retries_failed_copies(synced: tuple[Callable[[], None], Path, Path]) -> None:
    sync, source, kept = synced
    (kept / "sub" / "b").mkdir(parents=True)
    with pytest.raises(TensorboardError, match=r"copying .*sub/b to .*sub/b: "):
        sync()
    assert files(kept) == {"a": "a"}
    (kept / "sub" / "b").rmdir()
    sync()
    assert files(kept) == files(source)


def test_sync_ignores_broken_links_and_staging_files(
    synced: tuple[Callable[[], None], Path, Path], tmp_path: Path
) -> None:
    sync, source, kept = synced
    (source / "gone").symlink_to(tmp_path / "nowhere")
    (source / "alias").symlink_to(source / "a")
    (source / ".a.77.part").write_text("half")
    sync()
    assert files(kept) == {"a": "a", "alias": "a", "sub/b": "sub/b", "sub/c": "sub/c"}
    assert not (kept / "alias").is_symlink()
