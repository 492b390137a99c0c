"""Sources of a checkpoint: folders to ``upload()``, files beside a state in ``save()``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core.core._checkpoint._sharding import Contribution
from det_core.storage import Disk, Listing, Selector, SourceFile, copy_in, host_id, parent_folders, scan
from det_core.storage._names import META_DIR, METADATA_FILE, is_relative_path

FolderOrFolders = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class UploadSource:
    """A rank's folder, its folders by name, or that it has none.

    Args:
        disk: the door to this machine's file system.
        ckpt_dir: the folder, or several; None: this rank has nothing to give.
        selector: which paths of the checkpoint are wanted.

    Raises:
        ValueError: folders with names that they cannot have in a checkpoint.
    """

    def __init__(self, disk: Disk, ckpt_dir: FolderOrFolders | None, selector: Selector | None) -> None:
        self._disk = disk
        folders = ckpt_dir if isinstance(ckpt_dir, Mapping) else {} if ckpt_dir is None else {"": ckpt_dir}
        self._paths = {name: os.path.abspath(os.fspath(path)) for name, path in folders.items()}
        self._given = ckpt_dir is not None
        self._selector = selector
        for name in self._paths if isinstance(ckpt_dir, Mapping) else ():
            check_file_name(name)
            if "/" in name:
                raise ValueError(f"ckpt_dir has a folder named {name!r}: expected a name without a slash")

    def check(self, root: str) -> None:
        """See that it can be uploaded to the store at ``root``.

        Raises:
            ValueError: If the folder does not exist, or the store is in it and no selector excludes that.
            RuntimeError: a selector without a folder.
        """
        if not self._given:
            if self._selector is not None:
                raise RuntimeError("upload() was given a selector, but no ckpt_dir to select from")
            return
        if not self._paths:
            raise ValueError("ckpt_dir={} names no folder")
        for given in self._paths.values():
            path = os.path.realpath(given)
            if not os.path.isdir(path):
                raise ValueError(f"ckpt_dir {given} is not a folder")
            if self._selector is None and os.path.realpath(root).startswith(path.rstrip("/") + "/"):
                raise ValueError(f"ckpt_dir {path} holds the checkpoint store {root}: save into another folder")

    def offer(self, metadata: dict[str, Any]) -> Contribution:
        """Return the selected files, with this rank's metadata."""
        if not self._given:
            return Contribution(Listing(), metadata, given=False)
        if "" in self._paths:
            return Contribution(scan(self._disk, self._paths[""], self._selector), metadata, _identity(self._paths[""]))
        whole = Listing()
        for name, path in self._paths.items():
            found = _scan_under(name, self._disk, path, self._selector)
            whole = Listing(whole.files | found.files, whole.directories + found.directories)
        same = tuple((name, _identity(path)) for name, path in self._paths.items())
        return Contribution(whole, metadata, same)


class ExtraFiles:
    """Files beside a state, by their paths in the checkpoint: bytes, or a file or folder to copy.

    Args:
        disk: the door to this machine's file system.
        files: the bytes or the path of each.
        beside: the path of the state's own file.

    Raises:
        TypeError, ValueError: one of them cannot be in the checkpoint; the message names it.
        StorageError: one of them cannot be read.
    """

    def __init__(self, disk: Disk, files: Mapping[str, bytes | os.PathLike[str]], *, beside: str) -> None:
        self._disk = disk
        self._contents: dict[str, bytes] = {}
        self._copies: list[Listing] = []
        for name, content in files.items():
            check_file_name(name)
            if name == beside:
                raise ValueError(f"files[{name!r}] has the name of the state's own file")
            if isinstance(content, bytes | bytearray | memoryview):
                self._contents[name] = content
                continue
            if isinstance(content, str) or not isinstance(content, os.PathLike):
                raise TypeError(
                    f"files[{name!r}] is a {type(content).__name__}: expected bytes (text.encode()) or a pathlib.Path"
                )
            self._copies.append(self._listing(name, content))
        _refuse_conflicts([beside, *self._contents], self._copies)

    def write(self, folder: Path) -> None:
        """Put them into ``folder``.

        Raises:
            StorageError: The disk refused; the message names path and operation.
        """
        for name, content in self._contents.items():
            path = folder / name
            self._disk.make_folders(os.fspath(path.parent))
            self._disk.write_file(os.fspath(path), content, sync=False)  # the commit syncs it
        for listing in self._copies:
            self._disk.make_folders(os.fspath(folder), parent_folders(listing.files))
            copy_in(self._disk, listing, os.fspath(folder))

    def _listing(self, name: str, path: os.PathLike[str]) -> Listing:
        source = os.path.abspath(path)
        if os.path.isdir(source):
            return _scan_under(name, self._disk, source, None)
        if not os.path.exists(source):
            raise ValueError(f"files[{name!r}]: {os.fspath(path)} does not exist")
        return Listing({name: SourceFile(source, self._disk.do("look at", source, os.path.getsize, source))})


def _refuse_conflicts(files: Sequence[str], copies: Sequence[Listing]) -> None:
    """Raise ValueError if a path is given twice, or both as a file and as a folder."""
    counts = Counter([*files, *(path for listing in copies for path in listing.files)])
    folders = parent_folders(counts).union(*(listing.directories for listing in copies))
    for path, count in counts.items():
        if count > 1 or f"{path}/" in folders:
            if count > 1:
                what = "two files"
            else:
                what = "a file and a folder"
            raise ValueError(f"name= and files= give {what} the path {path!r}: rename one of them")


def check_file_name(name: str) -> None:
    """Raise ValueError unless a file of a checkpoint can have this name."""
    if not isinstance(name, str) or not is_relative_path(name) or name.split("/", 1)[0] in (META_DIR, METADATA_FILE):
        raise ValueError(f"name={name!r}: expected the name of a file in the checkpoint, such as 'state.pt'")


def _identity(folder: str) -> Hashable:
    """Return the identity of a folder, unique across hosts; neither an inode nor a path alone is that."""
    found = os.stat(folder)
    return host_id(), found.st_dev, found.st_ino


def _scan_under(name: str, disk: Disk, path: str, selector: Selector | None) -> Listing:
    """Return the files of a folder, by their paths in a checkpoint with the folder under ``name``."""
    wanted = selector and (lambda inner: selector(f"{name}/{inner}"))
    found = scan(disk, path, wanted, exclude=(META_DIR,))
    files = {f"{name}/{inner}": source for inner, source in found.files.items()}
    return Listing(files, [f"{name}/", *(f"{name}/{inner}" for inner in found.directories)])
