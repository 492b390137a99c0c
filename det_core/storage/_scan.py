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
    walk = _Walk(disk, os.path.realpath(root), selector, Listing(), [_Pending(root, "", (), False)])
    while walk.pending:
        walk.read(walk.pending.pop(), exclude)
        exclude = ()  # names are excluded at the top alone
    listing = walk.listing
    if selector is not None:
        above = {directory for path in (*listing.files, *walk.selected) for directory in parents(path)}
        listing.directories = [path for path in listing.directories if path in above or path in walk.selected]
    listing.directories.sort()
    return listing


class _Pending(NamedTuple):
    """A directory still to be read."""

    path: str
    prefix: str
    """Relative path with a slash at its end; empty at the top."""
    above: tuple[str, ...]
    """Real paths of the directories with the links that lead here."""
    is_linked: bool


@dataclass
class _Walk:
    """State of a scan."""

    disk: Disk
    top: str
    selector: Selector | None
    listing: Listing
    pending: list[_Pending]
    """A stack, as Python's own ends at some 500 nested directories."""
    selected: set[str] = field(default_factory=set)
    """Directories that the selector includes by their own names."""

    def read(self, directory: _Pending, exclude: Collection[str]) -> None:
        """Add the entries of a directory to the listing."""
        for entry in self.disk.entries(directory.path):
            path = directory.prefix + entry.name
            try:
                if entry.name in exclude:
                    _check_reserved(entry)
                else:
                    self._add(entry, path, directory)
            except _InvalidEntry as e:
                # Its kind is unknown, so the selector is asked about both a file and a directory.
                if self.selector is None or self.selector(path) or self.selector(path + "/"):
                    raise ValueError(str(e)) from None

    def _add(self, entry: os.DirEntry[str], path: str, parent: _Pending) -> None:
        above = parent.above
        is_link = entry.is_symlink()
        if is_link:
            above = (*above, os.path.realpath(parent.path))  # only behind a link can a directory be its own parent
            self._check_link(entry, above)
        is_linked = is_link or parent.is_linked
        if not _is_directory(entry):
            if self.selector is None or self.selector(path):
                self.listing.files[_check_utf8(path)] = _source(entry, is_linked)
            return
        self.listing.directories.append(_check_utf8(path) + "/")
        if is_link:
            self.listing.links.append(path)
        if self.selector is not None and self.selector(path + "/"):
            self.selected.add(path + "/")
        self.pending.append(_Pending(entry.path, path + "/", above, is_linked))

    def _check_link(self, entry: os.DirEntry[str], above: tuple[str, ...]) -> None:
        target = os.path.realpath(entry.path)
        if target != self.top and not target.startswith(self.top.rstrip("/") + "/"):
            raise _InvalidEntry(
                f"{entry.path} is a link to {target}, outside the directory {self.top}: copy the file in, remove the "
                "link, or exclude it by a selector"
            )
        if any((path + "/").startswith(target + "/") for path in above):
            raise _InvalidEntry(
                f"{entry.path} is a link to a directory that contains it: a checkpoint cannot contain itself"
            )


class _InvalidEntry(Exception):
    """An entry that cannot be in a checkpoint; an error only if it is selected."""


def _check_reserved(entry: os.DirEntry[str]) -> None:
    """Reject a reserved name of the other kind, file or directory, which would be left out silently."""
    if _is_directory(entry) != (entry.name == META_DIR):
        kind = "file" if entry.name == META_DIR else "directory"
        raise _InvalidEntry(
            f"{entry.path} is a {kind} with a name that det_core uses itself in a checkpoint: rename it, or exclude it "
            "by a selector"
        )


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as e:  # such as links in a circle
        raise _InvalidEntry(
            f"{entry.path} cannot be read ({e.strerror}): remove it, or exclude it by a selector"
        ) from e


def _source(entry: os.DirEntry[str], shared: bool) -> SourceFile:
    try:
        status = entry.stat()
    except OSError as e:
        raise _InvalidEntry(
            f"{entry.path} cannot be read ({e.strerror}): a checkpoint contains files and directories"
        ) from e
    if not stat.S_ISREG(status.st_mode):
        raise _InvalidEntry(f"{entry.path} is neither a file nor a directory: remove it, or exclude it by a selector")
    return SourceFile(entry.path, status.st_size, shared or status.st_nlink > 1)


def _check_utf8(path: str) -> str:
    """Return the path if it is UTF-8, as in a manifest."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _InvalidEntry(f"{os.fsencode(path)!r} is not a UTF-8 name: a manifest cannot contain it") from None
    return path
