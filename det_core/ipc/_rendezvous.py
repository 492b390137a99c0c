"""How the ranks of one machine find each other: a unix socket whose path all of them compute alike.

The chief holds a lock beside the socket for as long as it lives, so a second job with the same key is told who is in
its way, and the socket of a chief that died is replaced. The folder belongs to the user alone (0700, owner checked);
on top of that each side asks the kernel who the other one is, and where there is a secret a worker proves that it
knows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from det_core._clock import monotonic
from det_core.errors import CollectiveTimeout, RendezvousError
from det_core.ipc._frames import UNTRUSTED_LIMIT, BadFrame, Cutter, Frame, Kind, encode
from det_core.ipc._liveness import Patience

if TYPE_CHECKING:
    from det_core.ipc._star import Star

PROTOCOL = 1
FOLDERS = ("/tmp", "/dev/shm", "/var/tmp")
"""Tried in order. Not the platform's temporary folder: that may differ from rank to rank."""
_LOCK_GRACE = 5.0
"""Seconds that a chief waits for the previous one, of a job that is just ending, to let go of the lock."""
_HANDSHAKE_TIMEOUT = 10.0


def rendezvous_path(key: tuple[str, ...], *, folders: tuple[str, ...] | None = None) -> str:
    """The socket of the job that ``key`` describes, in a folder that only this user can enter."""
    digest = hashlib.sha256("\0".join(("det_core", str(os.getuid()), *key)).encode()).hexdigest()[:32]
    return f"{_private_folder(folders or FOLDERS)}/{digest}"


def _private_folder(folders: tuple[str, ...]) -> str:
    refused = []
    for parent in folders:
        path = f"{parent}/det_core-{os.getuid()}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            refused.append(f"{path}: {e.strerror}")
            continue
        entry = os.lstat(path)
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid():
            refused.append(f"{path}: belongs to user {entry.st_uid}, or is no folder")
            continue
        if stat.S_IMODE(entry.st_mode) != 0o700:
            os.chmod(path, 0o700)
        return path
    raise RendezvousError(f"no folder of this user's own for a socket between the ranks: {'; '.join(refused)}")


@dataclass(frozen=True)
class Hello:
    """Who a worker says it is."""

    rank: int
    size: int
    host: str
    pid: int
    job: str = ""
    protocol: int = PROTOCOL
    proof: str = ""

    def encode(self) -> bytes:
        """For the wire: JSON, because the reader does not trust the writer yet."""
        return json.dumps(self.__dict__).encode()

    @classmethod
    def decode(cls, data: Any) -> Hello:
        """From the wire.

        Raises:
            BadFrame: it is none.
        """
        try:
            hello = cls(**json.loads(bytes(data)))
            numbers = (hello.rank, hello.size, hello.pid, hello.protocol)
            if all(type(n) is int for n in numbers) and all(
                isinstance(t, str) for t in (hello.host, hello.job, hello.proof)
            ):
                return hello
        except (ValueError, TypeError, RecursionError):
            pass
        raise BadFrame("a hello that is none")


def prove(secret: str | None, nonce: str, rank: int) -> str:
    """What a worker that knows ``secret`` answers to the chief's ``nonce``."""
    if secret is None:
        return ""
    return hmac.new(secret.encode(), f"det_core hello {nonce} {rank}".encode(), "sha256").hexdigest()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The pid and the user of the process at the other end, as the kernel knows them."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


class Door:
    """The chief's listening socket and the lock that goes with it.

    Raises:
        RendezvousError: another process holds the lock; the message names it.
    """

    def __init__(self, path: str) -> None:
        self.path = path + ".sock"
        self._lock_path = path + ".lock"
        self._lock = self._take_lock()
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                _unlink(self.path)
                self.sock.bind(self.path)
                os.chmod(self.path, 0o600)
                self.sock.listen(512)
            except BaseException:
                self.sock.close()
                raise
        except BaseException:
            os.close(self._lock)
            raise

        _sweep(os.path.dirname(path))

    def _take_lock(self) -> int:
        began = monotonic()
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
                if holder == str(os.getpid()) or monotonic() - began > _LOCK_GRACE:
                    os.close(fd)
                    raise RendezvousError(_held(holder, self._lock_path)) from None
            os.close(fd)
            time.sleep(0.02)

    def close(self) -> None:
        """Stop listening and remove the files. Only the holder of the lock removes them, so no new chief's are."""
        self.sock.close()
        _unlink(self.path)
        _unlink(self._lock_path)
        os.close(self._lock)

    def abandon(self) -> None:
        """Close the descriptors only: in a forked child."""
        self.sock.close()
        os.close(self._lock)


def _sweep(folder: str) -> None:
    """Remove what chiefs that were killed have left: the files of locks that nobody holds."""
    for name in os.listdir(folder):
        if not name.endswith(".lock"):
            continue
        path = f"{folder}/{name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                _unlink(path.removesuffix(".lock") + ".sock")
                _unlink(path)
        except OSError:  # held, or just removed by another
            continue
        finally:
            os.close(fd)


def _held(holder: str, path: str) -> str:
    whose = "this process" if holder == str(os.getpid()) else f"process {holder}"
    return (
        f"{whose} is already the chief of a job with the same key (lock {path}). Close that DistributedContext first; "
        "if it is another job on this machine, give each a pub_port of its own: DistributedContext(…, pub_port=12361) "
        "or export INTER_TRAIN_PROCESS_COMM_PORT_1=12361"
    )


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def who_am_i() -> bytes:
    """This process, for the other side's messages."""
    return json.dumps([socket.gethostname(), os.getpid()]).encode()


def wait_for(star: Star, event: threading.Event, whom: Callable[[], str]) -> None:
    """Wait for ``event`` of the rendezvous as long as everybody who is there lives.

    Raises:
        CollectiveTimeout: the star has a timeout, and it has passed.
        PeerLost: a rank died meanwhile.
    """
    patience = Patience(star.timeout, lambda: f"rank {star.name(star.rank)} in the rendezvous: {whom()}")
    while not event.wait(patience.next(0.2)):
        for peer in star.others(gone=True)[:1]:
            star.lost(peer)
        star.raise_if_broken()
        if patience.expired:
            raise CollectiveTimeout(f"the rendezvous took longer than {patience.waited:.1f} s: {whom()}")


class Refused(Exception):
    """The chief does not let this process in; ``again``: it may later."""

    def __init__(self, reason: str, again: bool) -> None:
        self.again = again
        super().__init__(reason)


def knock(
    path: str, hello: Callable[[str], Hello]
) -> tuple[socket.socket, Frame, socket.socket, tuple[int, int]] | None:
    """Connect to the chief and introduce this process.

    Args:
        path: from ``rendezvous_path``.
        hello: makes the hello for the chief's nonce.

    Returns:
        The control socket, the WELCOME frame, the user lane's socket, and the chief's pid and user; None: there is
        nobody (yet).

    Raises:
        Refused: by the chief.
        RendezvousError: whoever listens there is not this user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_HANDSHAKE_TIMEOUT)
        try:
            sock.connect(path + ".sock")
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError):
            sock.close()
            return None
        credentials = peer_credentials(sock)
        if credentials[1] != os.getuid():
            raise RendezvousError(f"{path}.sock belongs to a process of user {credentials[1]}, not to this user")
        answer = _introduce(sock, hello)
        if answer is None:
            sock.close()
            return None
        return sock, answer[0], answer[1], credentials
    except BaseException:
        sock.close()
        raise


def _introduce(sock: socket.socket, hello: Callable[[str], Hello]) -> tuple[Frame, socket.socket] | None:
    try:
        challenge, _ = _read_one(sock)
        sock.sendall(encode(Kind.HELLO, body=hello(bytes(challenge.segments[0]).decode()).encode()))
        answer, fds = _read_one(sock)
    except (ConnectionError, TimeoutError):
        return None
    if answer.kind == Kind.REFUSED:
        again, reason = json.loads(bytes(answer.segments[0]))
        raise Refused(reason, again)
    if answer.kind != Kind.WELCOME or len(fds) != 1:
        raise RendezvousError("the chief's answer to the hello makes no sense: do all ranks run the same det_core?")
    return answer, socket.socket(fileno=fds[0])


def _read_one(sock: socket.socket) -> tuple[Frame, list[int]]:
    """Read one frame and not a byte more; with it the descriptors that came along."""
    cutter, fds = Cutter(limit=UNTRUSTED_LIMIT), []
    while True:
        data, new, _, _ = socket.recv_fds(sock, 1, 4, socket.MSG_CMSG_CLOEXEC)
        fds += new
        if not data:
            raise ConnectionResetError("the other end closed during the handshake")
        cutter.room()[:1] = data
        for frame, lengths, body in cutter.fill(1):
            if lengths:
                frame.segments = [body]
            return frame, fds
