"""Bad input gets a clear error before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, ContextClosed
from det_core.storage._manifest import decode_metadata
from support.checkpoints import FILES, STEPS, Recorder, alone, fill, tree


class Number:
    """As a scalar of numpy or torch: no dimension, and an item."""

    shape = ()

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


def refused(context: CheckpointContext, tmp_path: Path, error: type[Exception], match: str, **arguments: Any) -> None:
    """Assert that upload and store_path refuse, and that the store's folder is not even made."""
    source = fill(tmp_path / "source")
    with pytest.raises(error, match=match):
        context.upload(source, **arguments)
    entered = False
    with pytest.raises(error, match=match), context.store_path(**arguments):
        entered = True
    assert not entered
    with pytest.raises(error, match=match):
        context.begin(**arguments)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (None, r'metadata=\{"steps_completed": N'),
        ({}, "steps_completed"),
        ({"step": 1}, "no 'steps_completed'"),
        ({"steps_completed": "3"}, "'3'"),
        ({"steps_completed": 3.0}, "3.0"),
        ({"steps_completed": True}, "True"),
        ({"steps_completed": -1}, "-1"),
        ({"steps_completed": None}, "None"),
        ([("steps_completed", 1)], "dictionary, not list"),
        ({"steps_completed": 1, "a": {"b": [0, object()]}}, "object at /a/b/1"),
        ({"steps_completed": 1, "a": b"bytes"}, "bytes at /a"),
        ({"steps_completed": 1, "a": {1: 2}}, "key 1 at /a"),
    ],
)
def test_metadata_is_checked_first(context: CheckpointContext, metadata: Any, match: str, tmp_path: Path) -> None:
    for shard in (False, True):
        refused(context, tmp_path, ValueError, match, metadata=metadata, shard=shard)


def test_metadata_that_holds_itself_is_refused(context: CheckpointContext, tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"steps_completed": 1}
    metadata["again"] = [metadata]
    with pytest.raises(
        ValueError, match="metadata is nested deeper than 200 levels, or holds itself, at /again/0/again"
    ):
        context.upload(fill(tmp_path / "source"), metadata)
    with pytest.raises(CheckpointCorrupt, match=r"metadata\.json"):
        decode_metadata(b"[" * 100_000, "checkpoint x")


def test_metadata_becomes_plain(tmp_path: Path) -> None:
    given = {"steps_completed": Number(5), "loss": Number(float("nan")), "t": (1, 2.5), "u": "\u00fc", "n": None}
    with alone() as distributed:
        recorder = Recorder()
        context = recorder.context(distributed, tmp_path / "store")
        storage_id = context.upload(fill(tmp_path / "source"), given)
        found = context.get_metadata(storage_id)
    assert repr(found) == repr({"steps_completed": 5, "loss": float("nan"), "t": [1, 2.5], "u": "\u00fc", "n": None})
    assert repr(recorder.registered[0]["metadata"]) == repr(found)


def test_a_folder_must_be_one(context: CheckpointContext, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for wrong in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ValueError, match="not a folder"):
            context.upload(wrong, STEPS)
    with pytest.raises(RuntimeError, match="shard=True"):
        context.upload(None, STEPS)
    with pytest.raises(RuntimeError, match="no ckpt_dir"):
        context.upload(None, STEPS, shard=True, selector=bool)
    with pytest.raises(RuntimeError, match="at least one"):
        context.upload(None, STEPS, shard=True)
    assert not (tmp_path / "store").exists()


def test_a_folder_that_holds_the_store_is_refused(tmp_path: Path) -> None:
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path / "source" / "store")
        with pytest.raises(ValueError, match="holds the checkpoint store"):
            context.upload(fill(tmp_path / "source"), STEPS)
        storage_id = context.upload(tmp_path / "source", STEPS, selector=lambda path: path == "rng")
        assert set(tree(tmp_path / "source" / "store" / storage_id)) == {"rng", "metadata.json"}


@pytest.mark.parametrize("storage_id", ["", "..", "../x", "a/b", "/abs", ".hidden", None, 7, "tensorboard"])
def test_a_storage_id_is_the_name_of_one_folder(storage_id: Any, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with alone() as distributed:
        recorder = Recorder()
        context = recorder.context(distributed, tmp_path / "store")
        with pytest.raises(ValueError, match="storage_id"):
            context.download(storage_id, tmp_path / "out")
        with pytest.raises(ValueError, match="storage_id"), context.restore_path(storage_id):
            pass
        with pytest.raises(ValueError, match="storage_id"):
            context.get_metadata(storage_id)
        with pytest.raises(ValueError, match="storage_id"):
            context.delete(storage_id)
    assert not (tmp_path / "out").exists()
    assert recorder.gone == recorder.restores == []


def test_an_unknown_id_is_not_found(context: CheckpointContext, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"'gone'.*store"):
        context.download("gone", tmp_path / "out")
    with pytest.raises(CheckpointNotFound, match="'gone'"), context.restore_path("gone"):
        pass
    with pytest.raises(LookupError, match="'gone'"):
        context.get_metadata("gone")
    assert not (tmp_path / "out").exists()


def test_a_download_into_the_stored_checkpoint_is_refused(context: CheckpointContext, tmp_path: Path) -> None:
    storage_id = context.upload(fill(tmp_path / "source"), STEPS)
    with pytest.raises(ValueError, match="stored checkpoint itself"):
        context.download(storage_id, tmp_path / "store" / storage_id / "sub")


def test_download_mode_must_be_one(context: CheckpointContext, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DownloadMode"):
        context.download("x", tmp_path / "out", "NO_SHARED_DOWNLOAD")  # type: ignore[arg-type]


class TestLinks:
    """Links in a folder that is uploaded or written into."""

    def test_out_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "elsewhere").mkdir()
        targets = {"file": "../secret", "folder": "../elsewhere", "absolute": str(tmp_path / "secret"), "dead": "none"}
        for name, target in targets.items():
            source = fill(tmp_path / f"source-{name}")
            (source / name).symlink_to(target)
            with alone() as distributed:
                context = Recorder().context(distributed, tmp_path / "store")
                with pytest.raises(ValueError, match=rf"source-{name}/{name} "):
                    context.upload(source, STEPS)
                assert not (tmp_path / "store").exists()
                kept = context.upload(source, STEPS, selector=lambda path, name=name: not path.startswith(name))  # type: ignore[misc]
                assert name not in tree(tmp_path / "store" / kept)
                context.delete(kept)
                (tmp_path / "store" / ".det_core-tmp").rmdir()
                (tmp_path / "store").rmdir()

    def test_store_path_refuses_them_too(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        recorder = Recorder()
        with alone() as distributed:
            context = recorder.context(distributed, tmp_path / "store")
            with pytest.raises(ValueError, match="outside the directory"), context.store_path(STEPS) as (path, _):
                fill(path)
                (path / "link").symlink_to(tmp_path / "secret")
        assert recorder.registered == []
        assert list((tmp_path / "store" / ".det_core-tmp").iterdir()) == []

    def test_inside_the_folder_is_copied(self, context: CheckpointContext, tmp_path: Path) -> None:
        expected = {
            **FILES,
            "latest": FILES["rng"],
            "all/optimizer.pt": FILES["sub/optimizer.pt"],
            "all/deep/empty": b"",
        }
        source = fill(tmp_path / "source")
        link(source)
        uploaded = context.upload(source, STEPS)
        assert os.readlink(source / "latest") == "rng"
        with context.store_path(STEPS) as (path, written):
            fill(path)
            link(path)
            os.link(path / "rng", tmp_path / "hard")
        for storage_id in (uploaded, written):
            stored = tmp_path / "store" / storage_id
            found = tree(stored)
            found.pop("metadata.json")
            assert found == expected
            assert not any(path.is_symlink() for path in stored.rglob("*"))
        (tmp_path / "hard").write_text("changed by another name")
        assert (stored / "rng").read_bytes() == FILES["rng"]

    def test_a_link_to_its_own_folder_is_refused(self, context: CheckpointContext, tmp_path: Path) -> None:
        source = fill(tmp_path / "source")
        (source / "sub" / "up").symlink_to("..")
        with pytest.raises(ValueError, match=r"sub/up .*contains it"):
            context.upload(source, STEPS)

    def test_links_in_a_circle_are_refused(self, context: CheckpointContext, tmp_path: Path) -> None:
        source = fill(tmp_path / "source")
        (source / "a").symlink_to("b")
        (source / "b").symlink_to("a")
        with pytest.raises(ValueError, match=r"source/a .*levels of symbolic links"):
            context.upload(source, STEPS)
        context.upload(source, STEPS, selector=lambda path: path not in ("a", "b", "a/", "b/"))

    def test_two_links_that_lead_into_each_other_are_refused(self, context: CheckpointContext, tmp_path: Path) -> None:
        source = tmp_path / "source"
        fill(source, {"a/x": b"x", "b/y": b"y"})
        (source / "a" / "b").symlink_to("../b")
        (source / "b" / "a").symlink_to("../a")
        with pytest.raises(ValueError, match="contains it"):
            context.upload(source, STEPS)


def link(folder: Path) -> None:
    """Make a link to a file, and one to a directory."""
    (folder / "latest").symlink_to("rng")
    (folder / "all").symlink_to(folder / "sub")


def test_folders_deeper_than_the_stack_of_python_are_stored(context: CheckpointContext, tmp_path: Path) -> None:
    depth = 600
    (source := tmp_path / "source").mkdir()
    (source / "/".join("d" * depth)).mkdir(parents=True)
    (source / "/".join("d" * depth) / "f").write_text("x")
    storage_id = context.upload(source, STEPS)
    with context.store_path(STEPS) as (path, _):
        (path / "/".join("d" * depth)).mkdir(parents=True)
    context.download(storage_id, tmp_path / "out")
    assert (tmp_path / "out" / "/".join("d" * depth) / "f").read_text() == "x"
    context.delete(storage_id)
    assert not (tmp_path / "store" / storage_id).exists()


@pytest.mark.parametrize(("name", "kind"), [("metadata.json", "directory"), (".det_core", "file")])
def test_name_of_ours_with_other_content_is_refused(
    context: CheckpointContext, name: str, kind: str, tmp_path: Path
) -> None:
    """To leave it out would lose it in silence."""
    source = fill(tmp_path / "source", {f"{name}/mine" if kind == "directory" else name: b"mine"})
    with pytest.raises(ValueError, match=f"{name} is a {kind} with a name that det_core uses itself"):
        context.upload(source, STEPS)
    with pytest.raises(ValueError, match=f"{name} is a {kind}"), context.store_path(STEPS) as (path, _):
        fill(path, {f"{name}/mine" if kind == "directory" else name: b"mine"})
    context.upload(source, STEPS, selector=lambda path: not path.startswith(name))


def test_what_is_no_file_is_refused(context: CheckpointContext, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    os.mkfifo(source / "pipe")
    with pytest.raises(ValueError, match="source/pipe is neither"):
        context.upload(source, STEPS)
    context.upload(source, STEPS, selector=lambda path: path != "pipe")


def test_a_name_that_is_not_utf8_is_refused(context: CheckpointContext, tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    (Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9"))).write_text("x")
    with pytest.raises(ValueError, match="not a UTF-8 name"):
        context.upload(source, STEPS)


def test_a_closed_context_says_so(context: CheckpointContext, tmp_path: Path) -> None:
    storage_id = context.upload(fill(tmp_path / "source"), STEPS)
    context.close()
    context.close()
    for call in (
        lambda: context.upload(tmp_path / "source", STEPS),
        lambda: context.begin(STEPS),
        lambda: context.download(storage_id, tmp_path / "out"),
        lambda: context.get_metadata(storage_id),
        lambda: context.delete(storage_id),
    ):
        with pytest.raises(ContextClosed):
            call()
