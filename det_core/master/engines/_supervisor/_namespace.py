"""A view of the machine in which the information files lie at the contract's fixed path.

Several trials run on a machine at once, and the path is the same for all: each gets a mount namespace of its own,
with a ``/run`` that has everything that is in ``/run``, and ``determined/info`` besides.
"""

from __future__ import annotations

import ctypes
import os

RUN = "/run"
OURS = "determined"
# <linux/sched.h>
_NEW_NAMESPACE = 0x00020000
_NEW_USERS = 0x10000000
# <linux/mount.h>
_NO_SUID = 2
_NO_DEVICES = 4
_BIND = 4096
_MOVE = 8192
_RECURSIVE = 16384
_DOWNSTREAM = 1 << 19
_LIBC = ctypes.CDLL(None, use_errno=True)


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
    # Mounts of the machine are still seen here, and none of these outside.
    _mount("none", "/", "", _RECURSIVE | _DOWNSTREAM)
    _mount("tmpfs", stage, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=64m")
    # /run is covered as a whole, since only root can make a folder in it.
    for entry in os.scandir(RUN):
        if entry.name != OURS:
            _repeat(entry, os.path.join(stage, entry.name))
    here = os.path.join(stage, OURS)
    os.makedirs(os.path.join(here, "info"))
    _mount(info, os.path.join(here, "info"), "", _BIND)
    os.symlink(work, os.path.join(here, "workdir"))
    _mount(stage, RUN, "", _MOVE)


def _leave() -> None:
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_NEW_NAMESPACE)
    except PermissionError:
        _unshare(_NEW_USERS | _NEW_NAMESPACE)
        for name, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


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
        _mount(entry.path, target, "", _BIND | _RECURSIVE)
    except FileNotFoundError:  # it was there a moment ago
        (os.rmdir if os.path.isdir(target) else os.unlink)(target)


def _unshare(flags: int) -> None:
    """Leave the namespaces that ``flags`` name for new ones; os.unshare() is in Python 3.12 only."""
    _check(_LIBC.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _check(answer: int, call: str) -> None:
    if answer != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
