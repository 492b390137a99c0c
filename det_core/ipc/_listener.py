"""The chief's unix socket, at a path that all ranks of a node compute alike.

The chief holds a lock beside the socket while it lives: a second job with the same key gets an error that names the
first, and the socket of a killed chief is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import time

from det_core._clock import monotonic
from det_core.errors import RendezvousError

SOCKET_DIRS = ("/tmp", "/dev/shm", "/var/tmp")
"""Parents of the sockets' directory, in order. Not ``tempfile``'s: TMPDIR may differ from rank to rank."""
_LOCK_TIMEOUT = 5.0
"""Maximum wait in seconds for the chief of a job that is just ending to release the lock."""
_LOCK_POLL_INTERVAL = 0.02
_BACKLOG = 512
"""Maximum number of pending connections: all ranks of a node may connect at the same moment."""


def rendezvous_path(key: tuple[str, ...]) -> str:
    """Return the path, without suffix, of the job with this key, in a directory that only this user can enter.

    Raises:
        RendezvousError: If no such directory can be made.
    """
    digest = hashlib.sha256("\0".join(("det_core", str(os.getuid()), *key)).encode()).hexdigest()[:32]
    return f"{_private_dir()}/{digest}"


def _private_dir() -> str:
    problems = []
    for parent in SOCKET_DIRS:
        path = f"{parent}/det_core-{os.getuid()}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            problems.append(f"{path}: {e.strerror}")
            continue
        # Not followed if it is a link: in /tmp any user may have made it.
        entry = os.lstat(path)
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid():
            problems.append(f"{path}: owned by user {entry.st_uid}, or not a directory")
            continue
        if stat.S_IMODE(entry.st_mode) != 0o700:
            os.chmod(path, 0o700)
        return path
    raise RendezvousError(f"no private directory for a socket between the ranks: {'; '.join(problems)}")


class Listener:
    """Listening socket with its lock.

    Args:
        path: path without suffix.

    Raises:
        RendezvousError: If another process holds the lock; the message names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path + ".sock"
        self._lock_path = path + ".lock"
        self._lock = self._take_lock()
        try:
            self.sock = self._listen()
        except BaseException:
            os.close(self._lock)
            raise
        _remove_stale_sockets(os.path.dirname(path))

    def _listen(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            _unlink(self.path)
            sock.bind(self.path)
            os.chmod(self.path, 0o600)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def _take_lock(self) -> int:
        began = monotonic()
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder removes the file as it closes: a lock on a removed one keeps nobody out.
                if os.fstat(fd).st_ino == os.stat(self._lock_path).st_ino:
                    os.ftruncate(fd, 0)
                    os.write(fd, str(os.getpid()).encode())
                    return fd
            except FileNotFoundError:
                pass
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(fd)
                    raise
                holder = os.pread(fd, 32, 0).decode() or "unknown"
                if holder == str(os.getpid()) or monotonic() - began > _LOCK_TIMEOUT:
                    os.close(fd)
                    raise RendezvousError(_describe_holder(holder, self._lock_path)) from None
            os.close(fd)
            time.sleep(_LOCK_POLL_INTERVAL)

    def close(self) -> None:
        """Stop listening and remove the files."""
        self.sock.close()
        # While the lock is held: afterwards these might be the files of the next chief.
        _unlink(self.path)
        _unlink(self._lock_path)
        os.close(self._lock)

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child."""
        self.sock.close()
        os.close(self._lock)


def _remove_stale_sockets(directory: str) -> None:
    """Remove the files of killed chiefs, whose locks no process holds."""
    for name in os.listdir(directory):
        if not name.endswith(".lock"):
            continue
        path = f"{directory}/{name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                _unlink(path.removesuffix(".lock") + ".sock")
                _unlink(path)
        except OSError:  # locked by a living chief, or removed by another one
            continue
        finally:
            os.close(fd)


def _describe_holder(holder: str, path: str) -> str:
    process = f"process {holder}"
    if holder == str(os.getpid()):
        process = "this process"
    return (
        f"{process} is already the chief of a job with the same key (lock {path}): close that DistributedContext "
        "first; if it is another job on this node, give each its own pub_port: DistributedContext(…, pub_port=12361) "
        "or export INTER_TRAIN_PROCESS_COMM_PORT_1=12361"
    )


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
