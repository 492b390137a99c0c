"""A view of the machine in which the information files lie at the contract's fixed path.

Several trials run on a machine at once, and the path is the same for all: each gets a mount namespace of its own,
with a ``/run`` that has everything that is in ``/run``, and ``determined/info`` besides.
"""

from __future__ import annotations

import os

from ._linux import BIND, DOWNSTREAM, MOVE, NEW_NAMESPACE, NEW_USERS, NO_DEVICES, NO_SUID, RECURSIVE, mount, unshare

RUN, OURS = "/run", "determined"


def appear(info: str, work: str, stage: str) -> None:
    """Leave this process's mount namespace for one with ``info`` at ``/run/determined/info``.

    Whoever is not root gets a user namespace for it, in which he is who he was.

    Args:
        info: the folder that is to appear.
        work: the folder to which ``/run/determined/workdir`` leads.
        stage: an empty folder outside ``/run``.

    Raises:
        OSError: that is not allowed here. The process may then be of no use for anything else.
    """
    if os.path.realpath(stage).startswith(RUN + "/"):
        raise OSError(f"{stage} is in {RUN}")
    _leave()
    mount("none", "/", "", RECURSIVE | DOWNSTREAM)
    mount("tmpfs", stage, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=64m")
    for entry in os.scandir(RUN):
        if entry.name != OURS:
            _repeat(entry, os.path.join(stage, entry.name))
    here = os.path.join(stage, OURS)
    os.makedirs(os.path.join(here, "info"))
    mount(info, os.path.join(here, "info"), "", BIND)
    os.symlink(work, os.path.join(here, "workdir"))
    mount(stage, RUN, "", MOVE)


def _leave() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        unshare(NEW_NAMESPACE)
    except PermissionError:
        unshare(NEW_USERS | NEW_NAMESPACE)
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _repeat(entry: os.DirEntry[str], target: str) -> None:
    """Let what is at ``entry`` be at ``target``, too."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
        return
    if entry.is_dir():
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC))
    try:
        mount(entry.path, target, "", BIND | RECURSIVE)
    except FileNotFoundError:  # it was there a moment ago
        (os.rmdir if os.path.isdir(target) else os.unlink)(target)
