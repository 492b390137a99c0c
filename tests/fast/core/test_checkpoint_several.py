"""Files beside a state, and checkpoints of several folders."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from det_core import client, core
from det_core.errors import CheckpointConflict, StorageError
from support.checkpoints import listed
from support.disks import small_disk
from support.ranks import running

torch = pytest.importorskip("torch")
STEP = {"steps_completed": 1}


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of a checkpoint without files of det_core."""
    names = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in names.items() if n != "metadata.json" and not n.startswith(".det_core/")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1")
    (folder / "inner" / "metadata.json").write_text("mine")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(("blocking", "storage"), [(True, "memory://several"), (False, None)])
def test_files_beside_a_state(source: Path, blocking: bool, storage: str | None) -> None:
    state = {"weights": torch.arange(5.0)}
    with core.init(checkpoint_storage=storage) as ctx:
        files = {"load_data.json": b"{}", "code": source, "deep/er/a.py": source / "a.py"}
        storage_id = ctx.checkpoint.save(state, STEP, name="model/state.pt", files=files, blocking=blocking)
        state["weights"].zero_()
        (source / "a.py").write_text("changed")  # while it is saved
    with core.init(checkpoint_storage=storage, resume=ctx.run_id) as ctx:
        with ctx.checkpoint.restore_path(storage_id) as path:
            found = tree(path)
            assert torch.load(path / "model/state.pt", weights_only=True)["weights"].tolist() == [0, 1, 2, 3, 4]
            assert (path / "code" / "empty").is_dir()
    del found["model/state.pt"]
    assert found == {
        "load_data.json": b"{}", "code/a.py": b"a = 1", "code/inner/metadata.json": b"mine", "deep/er/a.py": b"a = 1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"a": "text"}, TypeError, r"files\['a'\] is a str: expected bytes .* or a pathlib.Path"),
        ({"a": 3}, TypeError, r"files\['a'\] is a int"),
        ({"../a": b""}, ValueError, "name='../a'"),
        ({"metadata.json": b""}, ValueError, "name='metadata.json'"),
        ({"state.pt": b""}, ValueError, r"files\['state.pt'\] has the name of the state's own file"),
        ({"a": Path("nowhere")}, ValueError, r"files\['a'\]: nowhere does not exist"),
    ],
)
def test_mistakes_in_files(files: dict[str, object], kind: type[Exception], message: str) -> None:
    with core.init() as ctx:
        with pytest.raises(kind, match=message):
            ctx.checkpoint.save({}, STEP, files=files)  # type: ignore[arg-type]
        assert ctx.checkpoint.save({}, STEP), "nothing was begun"


@pytest.mark.parametrize(
    ("name", "files", "path"),
    [
        ("state.pt", {"a": b"", "a/b": b""}, "a"),
        ("state.pt", {"state.pt/b": b""}, "state.pt"),
        ("a/state.pt", {"a": b""}, "a"),
        ("a.py/state.pt", {"a.py": "a.py"}, "a.py"),
        ("code/a.py", {"code": "."}, "code/a.py"),
        ("state.pt", {"code": ".", "code/a.py": b""}, "code/a.py"),
        ("state.pt", {"code": ".", "code/empty": b""}, "code/empty"),
    ],
)
def test_files_in_conflict_are_refused(source: Path, name: str, files: dict[str, Any], path: str) -> None:
    given = {key: source / content if isinstance(content, str) else content for key, content in files.items()}
    with core.init() as ctx:
        for blocking in (True, False):
            with pytest.raises(ValueError, match=f"the path '{path}'"):
                ctx.checkpoint.save({}, STEP, name=name, files=given, blocking=blocking)
        ctx.checkpoint.save({}, STEP)
    assert len(client.checkpoints(run=ctx.run_id)) == 1


@pytest.mark.parametrize("blocking", [True, False])
def test_disk_error_in_files_is_a_storage_error_with_its_path(blocking: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as disk, core.init(checkpoint_storage=disk / "store") as ctx:
        with pytest.raises(StorageError, match=r"cannot write .*/large: No space left") as caught:
            ctx.checkpoint.save({}, STEP, files={"large": bytes(2_000_000)}, blocking=blocking)
        assert caught.value.errno == errno.ENOSPC
        for files in ({"x" * 300: b""}, {"x" * 300 + "/f": b""}):
            with pytest.raises(StorageError, match=r"xxx.*: File name too long"):
                ctx.checkpoint.save({}, STEP, files=files, blocking=blocking)
        ctx.checkpoint.save({}, STEP, files={"small": b"s"})
        assert len(listed(disk / "store")) == 1


def test_several_folders_in_one_checkpoint(source: Path, tmp_path: Path) -> None:
    last = tmp_path / "last"
    last.mkdir()
    (last / "b.py").write_text("b = 2")
    before = tree(source), tree(last)
    with core.init() as ctx:
        wanted = lambda path: path != "best/a.py"  # noqa: E731
        storage_id = ctx.checkpoint.upload({"best": source, "last": str(last)}, STEP, blocking=False, selector=wanted)
    with core.init(resume=ctx.run_id) as ctx:
        with ctx.checkpoint.restore_path(storage_id) as path:
            assert tree(path) == {"best/inner/metadata.json": b"mine", "last/b.py": b"b = 2"}
    assert (tree(source), tree(last)) == before, "the caller keeps his"


def test_a_restored_checkpoint_can_be_one_of_them(source: Path) -> None:
    with core.init() as ctx:
        one = ctx.checkpoint.upload(source, STEP)
        with ctx.checkpoint.restore_path(one) as path:
            both = ctx.checkpoint.upload({"best": path, "last": source}, STEP)
        with ctx.checkpoint.restore_path(both) as path:
            assert not (path / "best" / ".det_core").exists()
            assert (path / "best" / "a.py").read_text() == (path / "last" / "a.py").read_text() == "a = 1"


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({}, "names no folder"),
        ({"a/b": "."}, "a name without a slash"),
        ({".det_core": "."}, "name='.det_core'"),
        ({"a": "nowhere"}, "nowhere is not a folder"),
    ],
)
def test_mistakes_in_folders(folders: dict[str, str], message: str) -> None:
    with core.init() as ctx, pytest.raises(ValueError, match=message):
        ctx.checkpoint.upload(folders, STEP)


RANKS = """
    import sys
    from pathlib import Path
    import torch
    from det_core import core

    distributed = core.DistributedContext.detect()
    rank, folder = distributed.rank, Path(sys.argv[1]) / str(distributed.rank)
    folder.mkdir()
    (folder / f"of-{rank}").write_text(str(rank))
    with core.init(distributed=distributed) as ctx:
        step = {"steps_completed": 1}
        files = {f"extra-{rank}": b"x", "common": folder}
        for blocking in (True, False):
            how = {"shard": True, "blocking": blocking}
            one = ctx.checkpoint.save({"rank": rank}, step, name=f"{rank}.pt", files=files, **how)
            two = ctx.checkpoint.upload({"best": folder, "last": folder}, step, **how)
            ctx.checkpoint.save({}, step, name=f"{rank}.pt", **how)  # waits for those before
            with ctx.checkpoint.restore_path(one) as path:
                found = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
                expected = {"0.pt", "1.pt", "common/of-0", "common/of-1", "extra-0", "extra-1"}
                assert {p for p in found if p != "metadata.json" and not p.startswith(".det_core")} == expected
            with ctx.checkpoint.restore_path(two) as path:
                for name in ("best", "last"):
                    assert [(path / name / f"of-{r}").read_text() for r in range(2)] == ["0", "1"]
        try:
            ctx.checkpoint.save({}, step, name=f"{rank}.pt", files={"same": str(rank).encode()}, shard=True)
        except Exception as e:
            print(type(e).__name__, e, flush=True)
"""


def test_by_several_ranks(tmp_path: Path) -> None:
    with running(RANKS, 2, tmp_path, args=(str(tmp_path),)) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)
    assert all(f"{CheckpointConflict.__name__}" in ranks.output(rank) for rank in range(2))
