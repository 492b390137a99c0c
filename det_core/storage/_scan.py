"""Scan a directory: relative POSIX paths, with the rules for links and reserved names."""

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
    """A file to copy or to seal."""

    path: str
    """Path to read it from."""
    size: int
    shared: bool = False
    """Whether it is reached by a link or has several names, so that its bytes may change under another one."""


@dataclass
class Listing:
    """Content of a directory."""

    files: dict[str, SourceFile] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    """Relative paths, each ending in a slash."""
    links: list[str] = field(default_factory=list)
    """The ``directories`` that are links, without the slash."""

    def without(self, paths: Collection[str]) -> Listing:
        """Return the listing without the files ``paths``."""
        return Listing({p: s for p, s in self.files.items() if p not in paths}, self.directories, self.links)


def scan(
    disk: Disk, root: str, selector: Selector | None = None, *, exclude: Collection[str] = RESERVED_NAMES
) -> Listing:
    """List a directory that is to become a checkpoint, following links that stay inside it.

    Args:
        disk: the file system.
        root: the directory.
        selector: returns whether to include a relative POSIX path; those of directories end in a slash. The directories
            above a selected path are included, too.
        exclude: names at the top of the directory that are skipped.

    Raises:
        ValueError: If a selected entry is a link that leads out of the directory, to nothing or to a directory above
            itself, is neither a file nor a directory, or has a name that is reserved or not UTF-8. The message names
            it.
        StorageError: If the directory cannot be read.
    """
    walk = _Walk(disk, os.path.realpath(root), selector, Listing(), [(root, "", (), False)])
    while walk.left:
        walk.folder(*walk.left.pop(), exclude)
        exclude = ()  # names are excluded at the top alone
    listing = walk.listing
    if selector is not None:
        above = {d for p in (*listing.files, *walk.wanted) for d in parents(p)}
        listing.directories = [d for d in listing.directories if d in above or d in walk.wanted]
    listing.directories.sort()
    return listing


@dataclass
class _Walk:
    """State of a scan."""

    disk: Disk
    top: str
    selector: Selector | None
    listing: Listing
    left: list[tuple[str, str, tuple[str, ...], bool]]
    """Directories still to read; a stack, as Python's own ends at some 500 nested directories."""
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
                    # Only behind a link can a directory be its own parent.
                    above_it = (*above, os.path.realpath(folder)) if link else above
                    self.enter(entry, path, above_it, linked or link, link)
                elif self.selector is None or self.selector(path):
                    self.listing.files[_utf8(path)] = _source(entry, linked or link)
            except _InvalidEntry as e:
                # Its kind is unknown, so the selector is asked about both a file and a directory.
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
                f"{entry.path} is a link to {target}, outside the directory {self.top}: copy the file in, remove the "
                "link, or exclude it by a selector"
            )
        if any((a + "/").startswith(target + "/") for a in (*above, os.path.realpath(folder))):
            raise _InvalidEntry(
                f"{entry.path} is a link to a directory that contains it: a checkpoint cannot contain itself"
            )


class _InvalidEntry(Exception):
    """An entry that cannot be in a checkpoint; an error only if it is selected."""


def _check_ours(entry: os.DirEntry[str]) -> None:
    """Reject a reserved name of the other kind, file or directory, which would be left out silently."""
    if _is_folder(entry) != (entry.name == META_DIR):
        kind = "file" if entry.name == META_DIR else "directory"
        raise _InvalidEntry(
            f"{entry.path} is a {kind} with a name that det_core uses itself in a checkpoint: rename it, or exclude it "
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
        raise _InvalidEntry(
            f"{entry.path} cannot be read ({e.strerror}): a checkpoint contains files and directories"
        ) from e
    if not stat.S_ISREG(found.st_mode):
        raise _InvalidEntry(f"{entry.path} is neither a file nor a directory: remove it, or exclude it by a selector")
    return SourceFile(entry.path, found.st_size, shared or found.st_nlink > 1)


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _InvalidEntry(f"{os.fsencode(path)!r} is not a UTF-8 name: a manifest cannot contain it") from None
    return path
