"""What the control groups of this process leave it: memory and processor time, version 1 and 2.

Formats: the kernel's Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst, proc(5) for
    ``/proc/self/cgroup`` and
``/proc/self/mountinfo``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page; no machine has this much."""


@dataclass(frozen=True)
class Cgroup:
    """The control group of this process for one controller, with its ancestors as far as they are visible.

    Attributes:
        folders: the group's folder first, then its parents up to the mount point.
        version: 1 or 2.
    """

    folders: tuple[Path, ...]
    version: int

    @classmethod
    def find(cls, controller: str, root: Path = Path("/")) -> Cgroup | None:
        """Find the group that ``controller`` (``memory``, ``cpu``, ``cpuacct``) keeps this process in.

        Args:
            controller: its name in version 1.
            root: where ``proc`` and the mounted file systems are.
        """
        try:
            groups = (root / "proc/self/cgroup").read_text()
            mounts = (root / "proc/self/mountinfo").read_text()
        except OSError:
            return None
        paths = _paths(groups)
        for version, key in ((1, controller), (2, "")):
            mount = _mount(mounts, version, controller)
            if mount is None or key not in paths:
                continue
            point = root / mount[1].lstrip("/")
            folders = _folders(point, mount[0], paths[key])
            if version == 1 or any((f / "cgroup.controllers").exists() for f in folders):
                return cls(folders, version)
        return None

    def numbers(self, name: str) -> list[tuple[Path, int]]:
        """The folders whose file ``name`` holds one integer, each with it; the text ``max`` is no integer."""
        found = []
        for folder in self.folders:
            text = _text(folder / name)
            if text is not None and text.lstrip("-").isdigit():
                found.append((folder, int(text)))
        return found


def free_memory(group: Cgroup | None) -> int | None:
    """Bytes that the tightest of the groups still leaves; None where none has a limit.

    Used memory does not count the file cache that the kernel would drop first.
    """
    if group is None:
        return None
    limit, usage, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    left = []
    for folder, allowed in group.numbers(limit):
        used = _text(folder / usage)
        if allowed < _UNLIMITED and used is not None:
            left.append(max(0, allowed - max(0, int(used) - _stat(folder / "memory.stat", cache))))
    return min(left, default=None)


def cpu_quota(group: Cgroup | None) -> tuple[float, int] | None:
    """Processors that the tightest of the groups allows, with how far up that is; None where none has a
    quota."""
    quotas = []
    for up, folder in enumerate(group.folders if group else ()):
        if group and group.version == 2:
            fields = (_text(folder / "cpu.max") or "max").split()
        else:
            fields = [_text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]) > 0:
            quotas.append((int(fields[0]) / int(fields[1]), up))
    return min(quotas, default=None)


def cpu_seconds(group: Cgroup, up: int) -> float | None:
    """Processor seconds used by the group, or by its ancestor ``up`` levels above; None where that is not
    counted."""
    if up >= len(group.folders):
        return None
    if group.version == 2:
        used = _stat(group.folders[up] / "cpu.stat", "usage_usec")
        return used / 1e6 if used else None
    text = _text(group.folders[up] / "cpuacct.usage")
    return int(text) / 1e9 if text is not None else None


def _paths(text: str) -> dict[str, str]:
    """The path of each controller in ``/proc/self/cgroup``; version 2 is the controller with the empty
    name."""
    found = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found.update({name: path for name in names.split(",")})
    return found


def _mount(text: str, version: int, controller: str) -> tuple[str, str] | None:
    """The root and the mount point of a hierarchy in ``/proc/self/mountinfo``."""
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        names = options.rpartition(" ")[2].split(",")
        if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in names):
            _, _, _, root, point = fields.split()[:5]
            return root, point
    return None


def _folders(point: Path, root: str, path: str) -> tuple[Path, ...]:
    """The group's folder and its parents up to ``point``, which shows the hierarchy from ``root`` on.

    In a container without a namespace of its own ``path`` is the host's, and only what is below ``root``
    is visible.
    """
    relative = os.path.relpath(path, root)
    own = point if relative.startswith("..") else Path(os.path.normpath(point / relative))
    chain = [own, *own.parents]
    return tuple(folder for folder in chain[: chain.index(point) + 1] if folder.exists())


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _stat(path: Path, key: str) -> int:
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
