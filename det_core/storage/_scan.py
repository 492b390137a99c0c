"""What lies in a folder: relative POSIX paths, with the rules for links and for names that are ours."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from det_core.storage._files import Disk
from det_core.storage._names import META_DIR, METADATA_FILE, parents

Selector = Callable[[str], bool]
RESERVED_NAMES = (META_DIR, METADATA_FILE)
"""Names at the top of a checkpoint that det_core writes itself."""


class SourceFile(NamedTuple):
    """A file to be copied or sealed."""

    path: str
    """Where it is read."""
    size: int
    shared: bool = False
    """Whether it is reached by a link, or has several names: its bytes may change under another name."""


@dataclass
class Listing:
    """The content of a folder."""

    files: dict[str, SourceFile] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    """Each ends in a slash."""
    links: list[str] = field(default_factory=list)
    """Those of ``directories`` that are links, without the slash."""

    def without(self, paths: Collection[str]) -> Listing:
        """The same without the files ``paths``."""
        return Listing({p: s for p, s in self.files.items() if p not in paths}, self.directories, self.links)


def scan(
    disk: Disk, root: str, selector: Selector | None = None, *, exclude: Collection[str] = RESERVED_NAMES
) -> Listing:
    """List a folder that is to become a checkpoint, following links that stay inside it.

    Args:
        disk: the door.
        root: the folder.
        selector: called with relative POSIX paths, folders with a slash at their end; says which are wanted. The
            folders above a wanted path are listed too.
        exclude: names at the top of the folder that are passed over.

    Raises:
        ValueError: a wanted entry is a link that leads out of the folder, to nothing or to a folder above itself, or
            is neither a file nor a folder, or has a name that is not UTF-8, or that is ours. The message names it.
        StorageError: the folder cannot be read.
    """
    walk = _Walk(disk, os.path.realpath(root), selector, Listing(), [(root, "", (), False)])
    while walk.left:
        walk.folder(*walk.left.pop(), exclude)
        exclude = ()
    found = walk.listing
    if selector is not None:
        above = {d for p in (*found.files, *walk.wanted) for d in parents(p)}
        found.directories = [d for d in found.directories if d in above or d in walk.wanted]
    found.directories.sort()
    return found


@dataclass
class _Walk:
    disk: Disk
    top: str
    selector: Selector | None
    listing: Listing
    left: list[tuple[str, str, tuple[str, ...], bool]]
    """Folders still to be read: a stack of ours, as Python's own ends at some 500 folders in one another."""
    wanted: set[str] = field(default_factory=set)

    def folder(self, folder: str, prefix: str, above: tuple[str, ...], linked: bool, exclude: Collection[str]) -> None:
        for entry in self.disk.entries(folder):
            path = prefix + entry.name
            link = entry.is_symlink()
            try:
                if entry.name in exclude:
                    _check_ours(entry)
                    continue
                if link:
                    self.check_link(entry, folder, above)
                if _is_folder(entry):
                    self.enter(entry, path, (*above, os.path.realpath(folder)) if link else above, linked or link, link)
                elif self.selector is None or self.selector(path):
                    self.listing.files[_utf8(path)] = _source(entry, linked or link)
            except _InvalidEntry as e:
                if self.selector is None or self.selector(path) or self.selector(path + "/"):
                    raise ValueError(str(e)) from None

    def enter(self, entry: os.DirEntry[str], path: str, above: tuple[str, ...], linked: bool, link: bool) -> None:
        self.listing.directories.append(_utf8(path) + "/")
        if link:
            self.listing.links.append(path)
        if self.selector is not None and self.selector(path + "/"):
            self.wanted.add(path + "/")
        self.left.append((entry.path, path + "/", above, linked))

    def check_link(self, entry: os.DirEntry[str], folder: str, above: tuple[str, ...]) -> None:
        target = os.path.realpath(entry.path)
        if target != self.top and not target.startswith(self.top.rstrip("/") + "/"):
            raise _InvalidEntry(
                f"{entry.path} is a link to {target}, outside the folder {self.top}: copy the file in, remove the "
                "link, or exclude it by a selector"
            )
        if any((a + "/").startswith(target + "/") for a in (*above, os.path.realpath(folder))):
            raise _InvalidEntry(f"{entry.path} is a link to a folder that holds it: a checkpoint cannot hold itself")


class _InvalidEntry(Exception):
    """An entry that cannot be in a checkpoint; an error only if it is wanted."""


def _check_ours(entry: os.DirEntry[str]) -> None:
    """Refuse what would be left out in silence: it has one of our names, and is another kind of thing."""
    if _is_folder(entry) != (entry.name == META_DIR):
        kind = "file" if entry.name == META_DIR else "folder"
        raise _InvalidEntry(
            f"{entry.path} is a {kind} with a name that det_core itself uses in a checkpoint: rename it, or exclude it "
            "out by a selector"
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as e:  # such as links in a circle
        raise _InvalidEntry(
            f"{entry.path} cannot be read ({e.strerror}): remove it, or exclude it by a selector"
        ) from e


def _source(entry: os.DirEntry[str], shared: bool) -> SourceFile:
    try:
        found = entry.stat()
    except OSError as e:
        raise _InvalidEntry(f"{entry.path} cannot be read ({e.strerror}): a checkpoint holds files and folders") from e
    if not stat.S_ISREG(found.st_mode):
        raise _InvalidEntry(f"{entry.path} is neither a file nor a folder: remove it, or exclude it by a selector")
    return SourceFile(entry.path, found.st_size, shared or found.st_nlink > 1)


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _InvalidEntry(f"{os.fsencode(path)!r} is a name that is not UTF-8: a manifest cannot hold it") from None
    return path
